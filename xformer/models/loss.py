"""The cross-entropy of a model's logits."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

from xformer import ops
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array, Tree
from xformer.dispatch.grad_callback import Ready
from xformer.layers.linear import LinearCache, LinearParams, LoRAParams, linear
from xformer.ops._loss import one


def cross_entropy_of(
    logits: Array, cache: Any, targets: Array, options: dict[str, Any]
) -> tuple[Array, LogitsLossCache]:
    """The cross-entropy of `logits`. cache: of the logits; its backward takes dlogits."""
    loss, loss_cache = ops.cross_entropy(logits, targets=targets, **options)
    return loss, LogitsLossCache(cache, loss_cache)


@short
class LogitsLossCache(NamedTuple):
    """Saved by `cross_entropy_of` for backward: the caches of the logits and of the loss."""

    logits: Any  # its backward takes dlogits
    loss: Any  # of `ops.cross_entropy`

    def backward(self, dloss: Array | None = None) -> Any:
        """Gradients, as the backward of the logits' cache returns them. dloss: None: 1."""
        return self.logits.backward(self.loss.backward(dloss))


def linear_loss(
    targets: Array, options: dict[str, Any], x: Array, params: LinearParams | LoRAParams
) -> tuple[Array, Any]:
    """The cross-entropy of the logits `layers.linear(x, params)`. Differentiates x and params."""
    if isinstance(params, LoRAParams):
        return cross_entropy_of(*linear(x, params), targets, options)
    w, b = params
    loss, cache = ops.linear_cross_entropy(
        x, value(w), value(b), targets=targets, trainable=not isinstance(w, Frozen), **options
    )
    return loss, LinearCache(cache, isinstance(b, Frozen))


@short
class LossCache(NamedTuple, Generic[Tree]):
    """Saved by a model's `loss` for backward: the cache of all its steps, and the loss."""

    model: Any  # its backward takes dloss
    value: Array  # (), the loss; gives the dtype and device of the default dloss

    def backward(self, dloss: Array | None = None, *, ready: Ready | None = None) -> Tree:
        """Gradients of the model's parameters. dloss: None: 1.

        ready: called with the name and the gradients of each part of the model ("head",
            "stack.blocks.7", "embed", ...), as soon as nothing is added to them any more: each
            gradient once. It must not write to them.
        """
        dloss = one(self.value) if dloss is None else dloss
        if ready is None:
            return self.model.backward(dloss)
        return self.model.backward(dloss, ready=ready)
