"""The contrastive loss of pairs of texts, from a model's pooled vectors."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.grad_callback import Ready
from xformer.ops._loss import one


def contrastive_loss(
    model: Any,
    params: Any,
    tokens: Array,
    *,
    mask: Array | None = None,
    pooling: str | tuple[str, ...] | None = None,
    skip: int = 0,
    scale: float = 20.0,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[Array, ContrastiveCache]:
    """The loss `ops.info_nce` of normalised vectors of pairs of texts, and its cache.

    model: a LanguageModel
    tokens: (2 B, T), B anchors and then their B partners
    mask: (2 B, T), True = a token, False = padding; None: no padding
    pooling: of `LanguageModel.pooled`; None: "last" for a causal model, else "mean"
    skip: of `LanguageModel.pooled`: tokens that are not pooled, such as a prompt's
    scale: of the cosine similarities
    dropout_key: None: no dropout
    ValueError for an odd number of texts.
    """
    n, odd = divmod(tokens.shape[0], 2)
    if odd:
        raise ValueError(f"contrastive_loss: tokens must be 2 B texts, got {tokens.shape[0]}")
    how = pooling or ("last" if model.causal else "mean")
    y, pooled = model.pooled(
        params, tokens, mask=mask, pooling=how, skip=skip, normalize=True, dropout_key=dropout_key
    )
    loss, cache = ops.info_nce(y[:n, :], y[n:, :], scale=scale)
    return loss, ContrastiveCache(cache, pooled, loss)


@short
class ContrastiveCache(NamedTuple):
    """Saved by `contrastive_loss` for backward: the caches of the loss and of the model."""

    loss: Any  # of `ops.info_nce`
    model: Any  # of `LanguageModel.pooled`
    value: Array  # (), the loss; gives the dtype and device of the default dloss

    def backward(self, dloss: Array | None = None, *, ready: Ready | None = None) -> Any:
        """Gradients of the model's parameters. dloss: None: 1. ready: of `LossCache.backward`."""
        da, db = self.loss.backward(one(self.value) if dloss is None else dloss)
        return self.model.backward(array_namespace(da).concat([da, db]), ready=ready)
