"""Logarithm of the softmax."""

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
def log_softmax(x: Array, *, axis: int = -1) -> tuple[Array, LogSoftmaxCache]:
    """y = x - max(x) - log(sum(exp(x - max(x)))) along `axis`.

    x, y: any shape with at least one axis. ValueError if `axis` does not exist or is empty.
    Derivation: docs/derivations/log_softmax.md
    """
    require_axis("log_softmax", x, axis)
    xp = array_namespace(x)
    shifted = x - xp.max(x, axis=axis, keepdims=True)
    y = shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))
    return y, LogSoftmaxCache(y, axis)


@short
class LogSoftmaxCache(NamedTuple):
    """Saved by `log_softmax` for backward: y, because the softmax is exp(y). x is not needed."""

    y: Array  # shape of x
    axis: int

    def backward(self, dy: Array) -> Array:
        """dx = dy - exp(y) * sum(dy)."""
        require_gradient("log_softmax", "dy", dy, self.y)
        xp = array_namespace(dy)
        return dy - xp.exp(self.y) * xp.sum(dy, axis=self.axis, keepdims=True)
