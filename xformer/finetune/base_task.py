"""The base of fine-tuning tasks: examples, batches of them, and their loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from xformer import ops
from xformer.base.typing import Array
from xformer.dispatch.checks import plain_numbers, whole
from xformer.generation.text import end_of
from xformer.inspection.summary import max_positions
from xformer.models import EncoderDecoder
from xformer.models.describe import in_words
from xformer.training.batch import IGNORED, Batch, padded
from xformer.training.loss import ArrayLoss

LONGEST = 512  # the default of max_len, in tokens


class Example(NamedTuple):
    """One text, or one pair of texts."""

    tokens: np.ndarray  # (T,)
    targets: Any  # (T,), or data of the task
    is_cut: bool = False  # whether the text was cut to max_len


@dataclass(frozen=True)
class Task(ArrayLoss):
    """A fine-tuning task: a model, its tokenizer and the most tokens of a text; and its loss.

    ValueError for a model that does not fit the task, and for a bad max_len.
    """

    model: Any
    tokenizer: Any
    max_len: int = LONGEST
    fields: ClassVar[tuple[str, ...]] = ("text",)

    def __post_init__(self) -> None:
        plain_numbers(self)
        if whole(self.max_len) is None or self.max_len < 2:
            raise ValueError(f"max_len must be an int of at least 2, got {self.max_len!r}")
        limit = max_positions(self.model)
        if limit is not None and self.max_len > limit:
            raise ValueError(f"max_len must be at most the model's {limit}, got {self.max_len}")

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """The examples of one record. ValueError, with the reason, if the record is unusable."""
        raise NotImplementedError

    def batch(self, examples: Sequence[Example], rng: np.random.Generator) -> Batch:
        """A batch of examples, with padding on the right. rng: for random choices of a task."""
        tokens, mask = padded([e.tokens for e in examples])
        targets, _ = padded([e.targets for e in examples], fill=IGNORED)
        n_targets = int((targets != IGNORED).sum())
        return Batch((tokens, targets), {"mask": mask}, n_targets, int(mask.sum()))

    loss = ArrayLoss.__call__

    def of(self, params: Any, inputs: Any, dropout_key: ops.RandomKey | None) -> tuple[Array, Any]:
        """The mean loss () of a batch's arrays and masks, and its cache: a function of arrays."""
        arrays, masks = inputs
        loss, cache = self.model.loss(
            params, *arrays, **masks, ignore_index=IGNORED, dropout_key=dropout_key
        )
        return loss, cache

    def _ids(self, text: str) -> tuple[np.ndarray, bool]:
        """The ids of a text, and whether they were cut to max_len.

        They are cut at the tokenizer's truncation_side. Special tokens around the text stay.
        """
        ids, _ = self.tokenizer.batch([text], max_len=self.max_len)
        is_cut = ids.shape[1] == self.max_len < len(self.tokenizer.encode(text))
        return self.known_ids(ids[0]), is_cut

    def _ended(self, text: str) -> np.ndarray:
        """The ids of a whole text, followed by the end token (`end_of`) if there is one."""
        ids = self.tokenizer.encode(text)
        end = end_of(self.tokenizer, self.model)
        return self.known_ids(ids + [end] * (end is not None and ids[-1:] != [end]))

    def _truncated(self, text: str, most: int) -> np.ndarray:
        """The ids of `_ended`, at most `most`, truncated at the tokenizer's truncation_side.

        If the ids are more than `most`: with "right" the last ids are dropped, including the end
        token. With "left" the text loses its first tokens; the special tokens and the end token
        stay.
        """
        ids = self._ended(text)
        if len(ids) <= most or self.tokenizer.truncation_side == "right":
            return ids[:most]
        n_added = len(ids) - len(self.tokenizer.encode(text))
        last, _ = self.tokenizer.batch([text], max_len=most - n_added)
        return np.append(last[0], ids[len(ids) - n_added :])

    def known_ids(self, ids: Any) -> np.ndarray:
        """The ids as an array. ValueError if one is not in the model's vocabulary."""
        ids = np.asarray(ids, np.int64)
        size = embed_of(self.model).vocab_size
        if len(ids) and int(ids.max()) >= size:
            raise ValueError(
                f"the tokenizer must be the model's, whose ids are below {size}, "
                f"got id {int(ids.max())}"
            )
        return ids


def embed_of(model: Any) -> Any:
    """The configuration of the embedding of a model's input."""
    return model.src_embed if isinstance(model, EncoderDecoder) else model.embed


def require(model: Any, wanted: str, fits: bool) -> None:
    """ValueError unless `fits`. wanted: the model that the task needs, for the message."""
    if not fits:
        raise ValueError(f"for this task the model must be {wanted}, got {in_words(model)}")
