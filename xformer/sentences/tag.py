"""Labels of the parts of texts, such as named entities, by a token classifier."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.base.choices import require_one_of
from xformer.dispatch.checks import require_sizes
from xformer.models import TokenClassifier
from xformer.models.describe import in_words
from xformer.pretrained.tokenizer import Encoding
from xformer.sentences.batches import (
    Finished,
    FirstItems,
    Progress,
    activated,
    encodings,
    listed,
    longest,
    outputs,
    require_language_model,
    require_text_ids,
)
from xformer.sentences.classify import labels

AGGREGATIONS = ("none", "simple", "first", "average", "max")


class Tag(NamedTuple):
    """A part of a text and its label."""

    label: str
    score: float  # the probability of the label; of several tokens, the mean
    start: int  # the characters text[start:end]
    end: int
    text: str


class Token(NamedTuple):
    """A token of a text, with the probabilities of its labels."""

    probs: np.ndarray  # (n_labels,)
    start: int  # the characters text[start:end]
    end: int
    continues: bool  # whether it belongs to the word of the token before; else it begins a word


def tag(
    model: Any,
    params: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    aggregation: str = "simple",
    ignore: Collection[str] = ("O",),
    max_len: int | None = None,
    stride: int | None = None,
    batch_size: int = 32,
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> list[list[Tag]]:
    """The labelled parts of each text, in order.

    model: a LanguageModel with a TokenClassifier; its labels are `labels(model)`
    aggregation: what a part is, as in transformers' TokenClassificationPipeline:
        - "none": a token, with the most probable label
        - "simple": neighbouring tokens of one label, without its B- or I-; B- begins a part
        - "first", "average", "max": neighbouring words of one label; the label of a word is that of
          its first token, of the mean of its tokens' probabilities, of its most certain token
    ignore: labels that are left out; for a part, without B- or I-
    max_len: the most tokens, special tokens included; None: the model's context. Longer texts are
        cut, with a warning, unless there is a stride
    stride: read longer texts in windows of max_len tokens; the number of tokens that a window
        shares with the one before. Of parts that overlap, the longest is kept
    batch_size, progress, finished (with a list of tags a text), and errors: see `embed`
    ValueError also for another model, and for a stride without aggregation.
    """
    require_language_model("tag", model)
    if not isinstance(model.head, TokenClassifier):
        raise ValueError(f"tag: the model must be a token classifier, got {in_words(model)}")
    require_one_of("tag: aggregation", aggregation, AGGREGATIONS)
    if isinstance(ignore, str):
        raise TypeError(f"tag: ignore must be a list of labels, got {ignore!r:.40}")
    if stride is not None:
        (stride,) = require_sizes("tag", 0, stride=stride)
        if aggregation == "none":
            raise ValueError('tag: a stride needs an aggregation, got "none"')
    names = labels(model)
    (batch_size,) = require_sizes("tag", 1, batch_size=batch_size)
    texts = listed("tag", texts)
    limit = longest("tag", model, max_len)
    windows = _windows(tokenizer, texts, limit, stride)
    found: list[list[list[Tag]]] = [[[] for _ in own] for own in windows]
    rows = [(i, k) for i, own in enumerate(windows) for k in range(len(own))]
    ids = [np.asarray(windows[i][k].ids, np.int64) for i, k in rows]
    require_text_ids("tag", ids, model.embed.vocab_size)
    ends = np.cumsum([len(own) for own in windows])
    first, in_order = FirstItems(len(rows)), finished is not None
    batches = outputs(
        params, [ids], activated(model, "softmax"), limit, batch_size, in_order=in_order
    )
    for numbers, probs in batches:
        for number, of_text in zip(numbers, probs, strict=True):
            i, k = rows[number]
            tokens = list(_tokens(tokenizer, texts[i], windows[i][k], of_text))
            found[i][k] = [
                part
                for part in _parts(tokens, names, texts[i], aggregation)
                if part.label not in ignore
            ]
        if progress is not None:
            progress(sum(rows[number][1] == 0 for number in numbers))
        start, end = np.searchsorted(ends, first.add(numbers), side="right").tolist()
        if finished is not None and end > start:
            finished(start, [_whole(of_text) for of_text in found[start:end]])
    return [_whole(of_text) for of_text in found]


def _windows(
    tokenizer: Any, texts: Sequence[str], limit: int, stride: int | None
) -> list[list[Encoding]]:
    """The tokens of each text, of at most `limit` tokens: cut, or in windows if stride is not None.

    ValueError for a text without tokens, and a stride that leaves no room for others.
    """
    windows = []
    for whole in encodings("tag", tokenizer, texts, "", limit, cut=stride is None):
        if stride is None or len(whole.ids) <= limit:
            windows.append([whole])
        else:
            windows.append(list(_split(whole, limit, stride)))
    return windows


def _split(whole: Encoding, limit: int, stride: int) -> Iterator[Encoding]:
    """Yield windows of `limit` tokens, each with the special tokens of the text."""
    own = [i for i, added in enumerate(whole.special) if not added]
    before, after = range(own[0]), range(own[-1] + 1, len(whole.ids))
    room = limit - len(before) - len(after)
    if stride >= room:
        raise ValueError(f"tag: stride must be below the {room} tokens of a window, got {stride}")
    for start in range(0, len(own), room - stride):
        kept = [*before, *own[start : start + room], *after]
        fields: Any = ([field[i] for i in kept] for field in whole)
        yield Encoding(*fields)
        if start + room >= len(own):
            break


def _tokens(tokenizer: Any, text: str, found: Encoding, probs: np.ndarray) -> Iterator[Token]:
    """Yield the tokens of a text that the tokenizer did not add. probs: (T, n_labels)."""
    for i, (start, end), added, own in zip(
        found.ids, found.spans, found.special, probs[: len(found.ids)], strict=True
    ):
        if not added:
            yield Token(own, start, end, tokenizer.continues(i, text, start, end))


def _parts(tokens: list[Token], names: list[str], text: str, aggregation: str) -> list[Tag]:
    """The parts of a text, also those that are ignored."""
    units = [[token] for token in tokens]
    if aggregation not in ("none", "simple"):
        units = _words(tokens)
    tags = [_tagged(unit, names, text, aggregation) for unit in units]
    return tags if aggregation == "none" else _joined(tags, text)


def _words(tokens: list[Token]) -> list[list[Token]]:
    words: list[list[Token]] = []
    for token in tokens:
        if words and token.continues:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _tagged(unit: list[Token], names: list[str], text: str, aggregation: str) -> Tag:
    """A token or a word with its most probable label."""
    probs = unit[0].probs
    if aggregation == "average":
        probs = np.mean([token.probs for token in unit], axis=0)
    elif aggregation == "max":
        probs = max(unit, key=lambda token: token.probs.max()).probs
    best = int(probs.argmax())
    start, end = unit[0].start, unit[-1].end
    return Tag(names[best], float(probs[best]), start, end, text[start:end])


def _joined(tags: list[Tag], text: str) -> list[Tag]:
    """Neighbours of one label as one part."""
    groups: list[list[Tag]] = []
    for one in tags:
        follows = groups and _bare(one.label) == _bare(groups[-1][-1].label)
        if follows and not one.label.startswith("B-"):
            groups[-1].append(one)
        else:
            groups.append([one])
    return [
        Tag(
            group[0].label.split("-", 1)[-1],
            float(np.mean([one.score for one in group])),
            group[0].start,
            group[-1].end,
            text[group[0].start : group[-1].end],
        )
        for group in groups
    ]


def _bare(label: str) -> str:
    """The label without B- or I-."""
    return label[2:] if label.startswith(("B-", "I-")) else label


def _whole(windows: list[list[Tag]]) -> list[Tag]:
    """The parts of a text."""
    return windows[0] if len(windows) == 1 else _apart(windows)


def _apart(windows: list[list[Tag]]) -> list[Tag]:
    """The parts of all windows of a text; of those that overlap, the longest, or most certain."""
    kept: list[Tag] = []
    for one in sorted((part for own in windows for part in own), key=lambda part: part.start):
        if kept and kept[-1].start <= one.start < kept[-1].end:
            kept[-1] = max(kept[-1], one, key=lambda part: (part.end - part.start, part.score))
        else:
            kept.append(one)
    return kept
