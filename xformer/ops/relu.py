"""Rectified linear unit."""

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
def relu(x: Array) -> tuple[Array, ReluCache]:
    """y = max(0, x), elementwise. The derivative at 0 is defined as 0.

    x, y: any shape. Derivation: docs/derivations/relu.md
    """
    y = array_namespace(x).maximum(x, 0.0)
    return y, ReluCache(y)


@short
class ReluCache(NamedTuple):
    """Saved by `relu` for backward: the output, which the next op saves too."""

    y: Array  # shape of x

    def backward(self, dy: Array) -> Array:
        """dx = dy if y > 0, else 0."""
        require_gradient("relu", "dy", dy, self.y)
        return array_namespace(dy).where(self.y > 0, dy, 0.0)
