"""The sigmoid approximation of the Gaussian error linear unit."""

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
from xformer.ops.silu import FAR

SLOPE = 1.702


@overridable
@shapes("x (...)")
def quick_gelu(x: Array) -> tuple[Array, QuickGeluCache]:
    """y = x * sigmoid(1.702 x), elementwise (arXiv:1606.08415, section 2).

    x, y: any shape. Derivation: docs/derivations/quick_gelu.md
    """
    xp = array_namespace(x)
    y = xp.maximum(x, -FAR) * stable_sigmoid(SLOPE * clip(x, -FAR, FAR))  # 0 at -inf
    return y, QuickGeluCache(x)


@short
class QuickGeluCache(NamedTuple):
    """Saved by `quick_gelu` for backward: x. The sigmoid is computed again."""

    x: Array

    def backward(self, dy: Array) -> Array:
        """dx = dy * s * (1 + 1.702 x * (1 - s)), s = sigmoid(1.702 x)."""
        require_gradient("quick_gelu", "dy", dy, self.x)
        x = SLOPE * clip(self.x, -FAR, FAR)
        s = stable_sigmoid(x)
        return dy * s * (1 + x * (1 - s))
