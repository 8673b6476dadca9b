"""The cross-entropy on top of a model."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

from xformer import ops
from xformer.layers.linear import LinearCache, LinearParams, LoRAParams, linear
from xformer.ops._loss import one
from xformer.showing import short
from xformer.tree import Frozen, value
from xformer.typing import Array, Tree


def cross_entropy_of(
    logits: Array, cache: Any, targets: Array, options: dict[str, Any]
) -> tuple[Array, LogitsLossCache]:
    """Cross-entropy of logits that are there; `cache` is theirs, whose backward follows on."""
    loss, loss_cache = ops.cross_entropy(logits, targets=targets, **options)
    return loss, LogitsLossCache(cache, loss_cache)


@short
class LogitsLossCache(NamedTuple):
    """What `cross_entropy_of` keeps for its backward."""

    logits: Any
    loss: Any

    def backward(self, dloss: Array | None = None) -> Any:
        """What the backward of the logits' cache returns."""
        return self.logits.backward(self.loss.backward(dloss))


def linear_loss(
    targets: Array, options: dict[str, Any], x: Array, params: LinearParams | LoRAParams
) -> tuple[Array, Any]:
    """Cross-entropy of the logits `layers.linear(x, params)`; gradients of x and params."""
    if isinstance(params, LoRAParams):
        return cross_entropy_of(*linear(x, params), targets, options)
    w, b = params
    loss, cache = ops.linear_cross_entropy(
        x, value(w), value(b), targets=targets, fixed=isinstance(w, Frozen), **options
    )
    return loss, LinearCache(cache, isinstance(b, Frozen))


@short
class LossCache(NamedTuple, Generic[Tree]):
    """What a model's `loss` keeps for its backward."""

    model: Any  # its backward takes dloss
    value: Array  # (), the loss

    def backward(self, dloss: Array | None = None) -> Tree:
        """Gradients of the model's parameters; dloss is 1 unless given."""
        return self.model.backward(one(self.value) if dloss is None else dloss)
