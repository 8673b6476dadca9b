"""The auxiliary loss that keeps a router's logits small."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_axis, require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._loss import one
from xformer.ops.load_balancing import kept_rows


@overridable
@shapes("logits (N, E)  mask (N)")
def router_z_loss(logits: Array, *, mask: Array | None = None) -> tuple[Array, RouterZLossCache]:
    """loss = mean over rows of log(sum(exp(logits)))^2 (arXiv:2202.08906, eq. 5).

    logits: (N, E)   mask: (N,) boolean   loss: ()
    mask: only rows with True count. If no row counts, the loss is 0.

    ValueError for another shape, TypeError for another dtype.
    Derivation: docs/derivations/router_z_loss.md
    """
    require_axis("router_z_loss", logits, -1, "logits")
    xp = array_namespace(logits)
    logits, weight = kept_rows("router_z_loss", logits, mask)
    top = xp.max(logits, axis=-1, keepdims=True)  # (N, 1)
    total = xp.sum(xp.exp(logits - top), axis=-1, keepdims=True)  # (N, 1)
    lse = xp.log(total) + top  # (N, 1)
    return xp.sum(weight * lse[:, 0] ** 2), RouterZLossCache(logits, top, total, weight)


@short
class RouterZLossCache(NamedTuple):
    """Saved by `router_z_loss` for backward, which recomputes the probabilities."""

    logits: Array  # (N, E), with zeros in masked rows
    top: Array  # (N, 1), the highest logit of a row
    total: Array  # (N, 1), sum(exp(logits - top))
    weight: Array  # (N,): 1 / (rows that count), or 0

    def backward(self, dloss: Array | None = None) -> Array:
        """dlogits = dloss * weight * 2 lse * p, p = exp(logits - top) / total."""
        dloss = one(self.logits) if dloss is None else dloss
        require_gradient("router_z_loss", "dloss", dloss, self.logits, ())
        xp = array_namespace(dloss)
        probs = xp.exp(self.logits - self.top) / self.total
        lse = xp.log(self.total) + self.top
        return 2 * dloss * self.weight[:, None] * lse * probs
