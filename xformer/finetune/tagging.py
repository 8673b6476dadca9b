"""The task of a token classifier: a label for each word of a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xformer.finetune.base_task import Example, Task, require
from xformer.finetune.classifier_head import is_classifier
from xformer.finetune.pairs import class_number
from xformer.pretrained.tokenizer import Encoding
from xformer.sentences import labels
from xformer.training.batch import IGNORED


class TagWords(Task):
    """Predict the label of each word, at its first token; other tokens have no loss.

    A label is its number or its name in the model, such as B-PER.
    """

    fields = ("words", "tags")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.model, "a token classifier", is_classifier(self.model, "token_classifier"))

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One example: the words with spaces between them, cut to max_len.

        ValueError for other numbers of words and tags, a bad tag, and words without tokens.
        """
        words, tags = fields["words"], fields["tags"]
        if len(words) != len(tags):
            raise ValueError(f"there must be a tag for each of {len(words)} words, got {len(tags)}")
        names = labels(self.model)
        numbers = [class_number(names, tag, "a tag") for tag in tags]
        text = " ".join(words)
        found = self.tokenizer.encoding(text, max_len=self.max_len)
        is_cut = len(found.ids) == self.max_len < len(self.tokenizer.encode(text))
        targets = np.full(len(found.ids), IGNORED, np.int64)
        for token, word in _first_tokens(words, found, is_cut):
            targets[token] = numbers[word]
        if (targets == IGNORED).all():
            raise ValueError("no word has a token")
        return [Example(self.known_ids(found.ids), targets, is_cut)]


def _first_tokens(words: list[str], found: Encoding, is_cut: bool) -> Iterator[tuple[int, int]]:
    """Yield the first token of each word that has tokens, and the number of the word.

    A token is of the word that has its last character, since a tokenizer may count a space before
    it, or none at all.

    found: the tokens of the words with spaces between them
    is_cut: whether tokens may be missing; then a word without its first character is left out
    """
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    last = -1
    for token, ((start, end), added) in enumerate(zip(found.spans, found.special, strict=True)):
        place = max(start, end - 1)
        word = int(np.searchsorted(starts, place, side="right")) - 1
        if added or word == last or place >= starts[word] + len(words[word]):
            continue
        last = word
        if not is_cut or start <= starts[word]:
            yield token, word
