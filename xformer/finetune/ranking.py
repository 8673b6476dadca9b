"""The task of a cross-encoder: the score of a document for a query."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.grad_callback import Ready
from xformer.finetune.base_task import Example, Task, require
from xformer.finetune.classifier_head import is_classifier
from xformer.finetune.data import SCORE
from xformer.finetune.pairs import labelled_batch, pair_example
from xformer.ops._loss import one
from xformer.training.batch import Batch


@dataclass(frozen=True)
class Rank(Task):
    """Predict the score of a pair of a query and a document, as sigmoid(logit).

    prompt: a text before each query, of `sentences.rank`
    """

    prompt: str = ""
    fields: ClassVar[tuple[str, ...]] = ("query", "document", SCORE)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = is_classifier(self.model) and self.model.head.n_labels == 1
        require(self.model, "a cross-encoder, a classifier of 1 class", known)

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One example, whose targets are the score and then the token types.

        Of a pair of more than max_len tokens the longer text is cut. ValueError for texts without
        tokens.
        """
        pair = self.prompt + fields["query"], fields["document"]
        return [pair_example(self, pair, np.float32(fields[SCORE]))]

    def batch(self, examples: Sequence[Example], rng: np.random.Generator) -> Batch:
        """A batch of pairs and their scores; with types if the model has them."""
        return labelled_batch(self.model, examples)

    def of(self, params: Any, inputs: Any, dropout_key: ops.RandomKey | None) -> tuple[Array, Any]:
        """The mean `binary_cross_entropy` of the pairs, and its cache."""
        (tokens, scores), masks = inputs
        logits, model = self.model.forward(params, tokens, **masks, dropout_key=dropout_key)
        loss, cache = binary_cross_entropy(logits[:, 0], scores)
        return loss, RankingCache(cache, model, loss)


@short
class RankingCache(NamedTuple):
    """Saved by the loss of `Rank` for backward: the caches of the loss and of the model."""

    loss: BinaryCrossEntropyCache
    model: Any  # of `LanguageModel.forward`
    value: Array  # (), the loss; gives the dtype and device of the default dloss

    def backward(self, dloss: Array | None = None, *, ready: Ready | None = None) -> Any:
        """Gradients of the model's parameters. dloss: None: 1. ready: of `LossCache.backward`."""
        dlogits = self.loss.backward(one(self.value) if dloss is None else dloss)
        return self.model.backward(dlogits[:, None], ready=ready)


def binary_cross_entropy(logits: Array, targets: Array) -> tuple[Array, BinaryCrossEntropyCache]:
    """loss = mean(-t log s - (1 - t) log(1 - s)), s = sigmoid(z); and its cache.

    logits: z, (N,)
    targets: t, (N,) in [0, 1]
    """
    xp = array_namespace(logits)
    t = xp.astype(targets, logits.dtype)
    # log s = min(z, 0) - log(1 + exp(-|z|)), which does not overflow
    terms = xp.maximum(logits, 0.0) - t * logits + xp.log1p(xp.exp(-xp.abs(logits)))
    return xp.sum(terms) / max(math.prod(logits.shape), 1), BinaryCrossEntropyCache(logits, t)


@short
class BinaryCrossEntropyCache(NamedTuple):
    """Saved by `binary_cross_entropy` for backward: its inputs. The sigmoid is computed again."""

    logits: Array
    targets: Array

    def backward(self, dloss: Array) -> Array:
        """dz = dloss * (sigmoid(z) - t) / N."""
        require_gradient("binary_cross_entropy", "dloss", dloss, self.logits, ())
        s, _ = ops.sigmoid(self.logits)
        return dloss * (s - self.targets) * (1 / max(math.prod(self.logits.shape), 1))
