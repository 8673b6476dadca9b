"""Tasks of labelled texts and pairs: classification, sequence to sequence, contrastive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from xformer import ops
from xformer.base.typing import Array
from xformer.finetune.base_task import Example, Task, require
from xformer.finetune.classifier_head import is_classifier
from xformer.finetune.contrastive import contrastive_loss
from xformer.generation.settings import start_of
from xformer.models import EncoderDecoder, LanguageModel
from xformer.sentences import labels
from xformer.sentences.batches import require_room
from xformer.sentences.classify import KINDS
from xformer.sentences.embed import n_tokens_of_prompt, pooling_of
from xformer.training.batch import IGNORED, Batch, padded


class Classify(Task):
    """Predict the class of a text. A label is the class's number or its name in the model."""

    fields: ClassVar[tuple[str, ...]] = ("text", "label")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.model, "a classifier", is_classifier(self.model))
        several = self.model.head.n_labels > 1
        require(self.model, "a classifier of 2 classes or more", several)
        kind = (self.model.hf_config or {}).get("problem_type")
        if kind not in (None, KINDS[0]):
            raise ValueError(f"the model's problem_type must be {KINDS[0]}, got {kind!r:.60}")

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One example, cut to max_len. ValueError for a text without tokens and a bad label."""
        ids, is_cut = self._ids(fields["text"])
        if not len(ids):
            raise ValueError("the text has no token")
        return [Example(ids, class_number(labels(self.model), fields["label"]), is_cut)]

    def batch(self, examples: Sequence[Example], rng: np.random.Generator) -> Batch:
        """A batch of texts and the numbers of their classes; pairs may have token types."""
        return labelled_batch(self.model, examples)


def class_number(names: list[str], label: Any, what: str = "label") -> int:
    """The number of the class `label`, a number or a name. ValueError, which calls it `what`."""
    if isinstance(label, str) and (n := names.count(label)) > 1:
        raise ValueError(f"{n} classes are called {label!r:.60}: {what} must be a number")
    if isinstance(label, str) and label in names:
        return names.index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        return label
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    raise ValueError(
        f"{what} must be a number below {len(names)} or one of {shown}, got {label!r:.60}"
    )


class ClassifyPairs(Classify):
    """Predict the class of a pair of texts, such as a premise and a hypothesis."""

    fields = ("text", "text_pair", "label")

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One example, whose targets are the class and then the token types.

        Of a pair of more than max_len tokens the longer text is cut. ValueError for texts without
        tokens and a bad label.
        """
        label = class_number(labels(self.model), fields["label"])
        return [pair_example(self, (fields["text"], fields["text_pair"]), np.int64(label))]


def pair_example(task: Task, pair: tuple[str, str], target: np.generic) -> Example:
    """The example of a pair of texts, whose targets are `target` and then the token types.

    Of a pair of more than max_len tokens the longer text is cut. ValueError for texts without
    tokens.
    """
    found = task.tokenizer.encoding(*pair, max_len=task.max_len)
    if not found.ids:
        raise ValueError("the texts have no token")
    is_cut = len(found.ids) == task.max_len < len(task.tokenizer.encoding(*pair).ids)
    targets = np.asarray([target, *found.types], target.dtype)
    return Example(task.known_ids(found.ids), targets, is_cut)


def labelled_batch(model: Any, examples: Sequence[Example]) -> Batch:
    """A batch of texts, and a number to predict for each, which is the first of its targets.

    Further targets are the token types of `pair_example`, for a model that has types.
    """
    tokens, mask = padded([e.tokens for e in examples])
    targets, masks = [np.atleast_1d(e.targets) for e in examples], {"mask": mask}
    if model.embed.n_types > 1 and len(targets[0]) > 1:
        masks["types"], _ = padded([row[1:].astype(np.int64) for row in targets])
    numbers = np.stack([row[0] for row in targets])
    return Batch((tokens, numbers), masks, len(numbers), int(mask.sum()))


class Seq2Seq(Task):
    """Predict a target text from a source text.

    Both are cut to max_len at the tokenizer's truncation_side.
    """

    fields = ("source", "target")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = isinstance(self.model, EncoderDecoder) and self.model.shared_embed
        known = known and self.model.head is not None
        wanted = "an encoder-decoder with one vocabulary and a head"
        require(self.model, wanted, known)
        if start_of(self.model) is None:
            raise ValueError("the model's configuration must have a decoder_start_token_id")

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One example, with the target's tokens as targets."""
        src, is_cut = self._ids(fields["source"])
        targets = self._truncated(fields["target"], self.max_len)
        is_cut = is_cut or len(targets) < len(self._ended(fields["target"]))
        return [Example(src, targets, is_cut)]

    def batch(self, examples: Sequence[Example], rng: np.random.Generator) -> Batch:
        """A batch: sources, the decoder's input (start token and target), and targets."""
        start: Any = start_of(self.model)
        src, src_mask = padded([e.tokens for e in examples])
        tgt, _ = padded([np.append(start, e.targets[:-1]) for e in examples])
        targets, mask = padded([e.targets for e in examples], fill=IGNORED)
        n_tokens = int(src_mask.sum() + mask.sum())
        return Batch((src, tgt, targets), {"src_mask": src_mask}, int(mask.sum()), n_tokens)


@dataclass(frozen=True)
class Contrastive(Task):
    """Find the positive of each anchor among all positives of a batch, by their vectors.

    pooling, prompt, include_prompt: of `sentences.embed`
    """

    pooling: str | tuple[str, ...] | None = None
    prompt: str = ""
    include_prompt: bool = True
    fields: ClassVar[tuple[str, ...]] = ("anchor", "positive")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = isinstance(self.model, LanguageModel) and self.model.embed is not None
        require(self.model, "an encoder or a decoder of tokens", known)
        require_room("contrastive", self.tokenizer, self.prompt, self.max_len)

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One pair, each text cut to max_len. ValueError for a text without tokens."""
        (a, a_cut), (b, b_cut) = (self._ids(self.prompt + fields[name]) for name in self.fields)
        if min(len(a), len(b)) <= self._skip:
            raise ValueError("a text has no token" + " after the prompt" * (self._skip > 0))
        return [Example(a, b, a_cut or b_cut)]

    def batch(self, examples: Sequence[Example], rng: np.random.Generator) -> Batch:
        """A batch: the anchors, and then the positives."""
        rows = [e.tokens for e in examples] + [e.targets for e in examples]
        tokens, mask = padded(rows)
        return Batch((tokens,), {"mask": mask}, len(examples), int(mask.sum()))

    def of(self, params: Any, inputs: Any, dropout_key: ops.RandomKey | None) -> tuple[Array, Any]:
        """The `contrastive_loss` of the pairs, and its cache."""
        (tokens,), masks = inputs
        return contrastive_loss(
            self.model,
            params,
            tokens,
            **masks,
            pooling=pooling_of("contrastive", self.model, self.pooling),
            skip=self._skip,
            dropout_key=dropout_key,
        )

    @property
    def _skip(self) -> int:
        """The number of tokens before a text that are not pooled."""
        return 0 if self.include_prompt else n_tokens_of_prompt(self.tokenizer, self.prompt)
