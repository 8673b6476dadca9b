"""Sigmoid linear unit, also called swish."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._pointwise import clip
from xformer.ops.sigmoid import stable_sigmoid

FAR = 1000.0  # sigmoid(-FAR) is 0 and sigmoid(FAR) is 1, to rounding


@overridable
@shapes("x (...)")
def silu(x: Array) -> tuple[Array, SiluCache]:
    """y = x * sigmoid(x), elementwise (arXiv:1702.03118).

    x, y: any shape. Derivation: docs/derivations/silu.md
    """
    y = array_namespace(x).maximum(x, -FAR) * stable_sigmoid(x)  # 0 at -inf
    return y, SiluCache(x)


@short
class SiluCache(NamedTuple):
    """Saved by `silu` for backward: x. The sigmoid is computed again."""

    x: Array

    def backward(self, dy: Array) -> Array:
        """dx = dy * s * (1 + x * (1 - s)), s = sigmoid(x)."""
        require_gradient("silu", "dy", dy, self.x)
        x = clip(self.x, -FAR, FAR)
        s = stable_sigmoid(x)
        return dy * s * (1 + x * (1 - s))
