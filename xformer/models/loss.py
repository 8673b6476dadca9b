"""The cross-entropy on top of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from xformer import ops
from xformer.typing import Array


def cross_entropy_of(
    logits: Array, cache: Any, targets: Array, options: dict[str, Any]
) -> tuple[Array, LossCache]:
    """Cross-entropy of a model's logits; `cache` is the model's, whose backward follows on."""
    loss, loss_cache = ops.cross_entropy(logits, targets=targets, **options)
    return loss, LossCache(loss_cache, cache)


class LossCache(NamedTuple):
    """What a model's `loss` keeps for its backward."""

    loss: Any
    model: Any

    def backward(self, dloss: Array | None = None) -> Any:
        """Gradients of the model's parameters; dloss is 1 unless given."""
        dloss = one(self.loss.lse) if dloss is None else dloss
        return self.model.backward(self.loss.backward(dloss))


def one(like: Array) -> Array:
    """The gradient of a loss with respect to itself."""
    xp = array_namespace(like)
    return xp.ones((), dtype=like.dtype, device=device(like))
