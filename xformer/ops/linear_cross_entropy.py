"""Cross-entropy of the logits x w + b: the head and the loss of a language model as one op."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.shapes import shapes
from xformer.ops.cross_entropy import cross_entropy
from xformer.ops.linear import linear


@overridable(composite=True)
@shapes("x (..., D)  w (D, V)  b (V)  targets (...)")
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    trainable: bool = True,
) -> tuple[Array, LinearCrossEntropyCache]:
    """loss = cross_entropy(x w + b), as one op, so that a kernel need not store all logits.

    x: (..., D)   w: (D, V)   b: (V,) or None   targets: (...) integers in [0, V)
    loss: (), or (...) for reduction "none"
    ignore_index, label_smoothing, z_loss, reduction: options of `cross_entropy`.
    trainable: False: w is not trained, and its gradient is None.

    Raises as `linear` and `cross_entropy` do.
    Derivation: docs/derivations/linear_cross_entropy.md
    """
    logits, linear_cache = linear(x, w, b, trainable=trainable)  # (..., V)
    loss, loss_cache = cross_entropy(
        logits,
        targets=targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )
    return loss, LinearCrossEntropyCache(linear_cache, loss_cache)


@short
class LinearCrossEntropyCache(NamedTuple):
    """Saved by `linear_cross_entropy` for backward: the caches of `linear` and `cross_entropy`."""

    linear: Any  # of `linear`
    loss: Any  # of `cross_entropy`

    def backward(self, dloss: Array | None = None) -> tuple[Array, Array | None, Array | None]:
        """dx = dlogits w^T, dw = x^T dlogits, db = sum of dlogits over all axes but the last.

        dw is None unless w is trainable; db is None without b.
        """
        dx, dw, db = self.linear.backward(self.loss.backward(dloss))
        return dx, dw, db
