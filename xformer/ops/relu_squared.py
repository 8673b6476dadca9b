"""Squared rectified linear unit."""

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
def relu_squared(x: Array) -> tuple[Array, ReluSquaredCache]:
    """y = max(0, x)^2, elementwise (arXiv:2109.08668).

    x, y: any shape. Derivation: docs/derivations/relu_squared.md
    """
    return array_namespace(x).maximum(x, 0.0) ** 2, ReluSquaredCache(x)


@short
class ReluSquaredCache(NamedTuple):
    """Saved by `relu_squared` for backward: x, from which the derivative is computed."""

    x: Array

    def backward(self, dy: Array) -> Array:
        """dx = dy * 2 * max(0, x)."""
        require_gradient("relu_squared", "dy", dy, self.x)
        return dy * (2 * array_namespace(dy).maximum(self.x, 0.0))
