"""Multiplication by one learned number."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient, require_shape
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (...)")
def scale(x: Array, alpha: Array) -> tuple[Array, ScaleCache]:
    """y = alpha * x, with one learned number alpha (a residual weight, arXiv:2003.04887).

    x, y: any shape   alpha: (1,)

    ValueError if alpha has another shape. Derivation: docs/derivations/scale.md
    """
    require_shape("scale", "alpha", alpha, (1,))
    return array_namespace(x).reshape(alpha, ()) * x, ScaleCache(x, alpha)


@short
class ScaleCache(NamedTuple):
    """Saved by `scale` for backward: both factors; each is the derivative by the other one."""

    x: Array  # any shape
    alpha: Array  # (1,)

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """dx = alpha * dy, dalpha = sum(dy * x) over all elements."""
        require_gradient("scale", "dy", dy, self.x)
        xp = array_namespace(dy)
        return xp.reshape(self.alpha, ()) * dy, xp.reshape(xp.sum(dy * self.x), (1,))
