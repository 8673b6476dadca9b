"""Scaling of vectors to length 1."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import number, require_axis, require_gradient
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (..., D)")
def l2_normalize(x: Array, *, eps: float = 1e-12) -> tuple[Array, L2NormalizeCache]:
    """y = x / max(|x|, eps), with |x| the Euclidean norm over the last axis (torch's F.normalize).

    x, y: (..., D). ValueError if D is 0 or eps negative.
    Derivation: docs/derivations/l2_normalize.md
    """
    eps = number("l2_normalize", "eps", eps, low=0)
    require_axis("l2_normalize", x, -1)
    xp = array_namespace(x)
    norm = xp.sqrt(xp.sum(x**2, axis=-1, keepdims=True))  # (..., 1)
    y = x / xp.maximum(norm, eps)
    return y, L2NormalizeCache(y, norm, eps)


@short
class L2NormalizeCache(NamedTuple):
    """Saved by `l2_normalize` for backward: y and the norms of x. x itself is not needed."""

    y: Array  # (..., D)
    norm: Array  # (..., 1), of x
    eps: float

    def backward(self, dy: Array) -> Array:
        """dx = (dy - y * sum(dy * y)) / |x|; if |x| < eps, dx = dy / eps."""
        require_gradient("l2_normalize", "dy", dy, self.y)
        y, norm, eps = self
        xp = array_namespace(dy)
        along = xp.sum(dy * y, axis=-1, keepdims=True)  # (..., 1)
        return (dy - y * xp.where(norm < eps, 0.0, along)) / xp.maximum(norm, eps)
