"""Softmax."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_axis, require_gradient
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (...)")
def softmax(x: Array, *, axis: int = -1) -> tuple[Array, SoftmaxCache]:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) along `axis`.

    x, y: any shape with at least one axis. ValueError if `axis` does not exist or is empty.
    Derivation: docs/derivations/softmax.md
    """
    require_axis("softmax", x, axis)
    xp = array_namespace(x)
    e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    y = e / xp.sum(e, axis=axis, keepdims=True)
    return y, SoftmaxCache(y, axis)


@short
class SoftmaxCache(NamedTuple):
    """Saved by `softmax` for backward: y, which gives the derivative. x is not needed."""

    y: Array  # shape of x
    axis: int

    def backward(self, dy: Array) -> Array:
        """dx = y * (dy - sum(dy * y))."""
        require_gradient("softmax", "dy", dy, self.y)
        xp = array_namespace(dy)
        return self.y * (dy - xp.sum(dy * self.y, axis=self.axis, keepdims=True))
