"""Logistic sigmoid."""

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
def sigmoid(x: Array) -> tuple[Array, SigmoidCache]:
    """y = 1 / (1 + exp(-x)), elementwise, without overflow for any x.

    x, y: any shape. Derivation: docs/derivations/sigmoid.md
    """
    y = stable_sigmoid(x)
    return y, SigmoidCache(y)


@short
class SigmoidCache(NamedTuple):
    """Saved by `sigmoid` for backward: y, because the derivative is y (1 - y). x is not needed."""

    y: Array  # shape of x

    def backward(self, dy: Array) -> Array:
        """dx = dy * y * (1 - y)."""
        require_gradient("sigmoid", "dy", dy, self.y)
        return dy * self.y * (1 - self.y)


def stable_sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x) if x >= 0, else e^x / (1 + e^x), so that the exponent is never positive."""
    xp = array_namespace(x)
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1.0, e) / (1 + e)
