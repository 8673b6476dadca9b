"""Hyperbolic tangent."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (...)")
def tanh(x: Array) -> tuple[Array, TanhCache]:
    """y = tanh(x), elementwise.

    x, y: any shape. Derivation: docs/derivations/tanh.md
    """
    y = array_namespace(x).tanh(x)
    return y, TanhCache(y)


@short
class TanhCache(NamedTuple):
    """Saved by `tanh` for backward: y, because the derivative is 1 - y^2. x is not needed."""

    y: Array  # shape of x

    def backward(self, dy: Array) -> Array:
        """dx = dy * (1 - y^2)."""
        require_gradient("tanh", "dy", dy, self.y)
        return dy * (1 - self.y**2)
