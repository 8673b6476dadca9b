"""Sigmoid linear unit, also called swish."""

from __future__ import annotations

from typing import NamedTuple

from xformer.dispatch import overridable
from xformer.ops.sigmoid import stable_sigmoid
from xformer.shapes import shapes
from xformer.typing import Array


@overridable
@shapes("x (...)")
def silu(x: Array) -> tuple[Array, SiluCache]:
    """y = x * sigmoid(x), elementwise (arXiv:1702.03118).

    x, y: any shape. Derivation: docs/derivations/silu.md
    """
    return x * stable_sigmoid(x), SiluCache(x)


class SiluCache(NamedTuple):
    """What `silu` keeps for its backward."""

    x: Array

    def backward(self, dy: Array) -> Array:
        """dx = dy * s * (1 + x * (1 - s)), s = sigmoid(x)."""
        s = stable_sigmoid(self.x)
        return dy * s * (1 + self.x * (1 - s))
