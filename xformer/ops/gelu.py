"""Gaussian error linear unit, exact and with the tanh approximation."""

from __future__ import annotations

import math
from typing import NamedTuple

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._pointwise import clip
from xformer.ops.sigmoid import stable_sigmoid

CUBIC = 0.044715
SCALE = math.sqrt(2 / math.pi)
FAR = 100.0  # Phi(-FAR) is 0 and Phi(FAR) is 1, to rounding


@overridable
@shapes("x (...)")
def gelu(x: Array, *, approximate: str = "none") -> tuple[Array, GeluCache]:
    """y = x * Phi(x), with Phi the normal distribution function (arXiv:1606.08415).

    approximate="none": Phi(x) = (1 + erf(x / sqrt(2))) / 2.
    approximate="tanh": Phi(x) = (1 + tanh(u)) / 2 = sigmoid(2 u),
        u = sqrt(2/pi) * (x + 0.044715 x^3).

    x, y: any shape. ValueError for another `approximate`. Derivation: docs/derivations/gelu.md
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: approximate must be "none" or "tanh", got {approximate!r}')
    xp = array_namespace(x)
    y = xp.maximum(x, -FAR) * _phi(clip(x, -FAR, FAR), approximate)  # 0 at -inf
    return y, GeluCache(x, approximate)


@short
class GeluCache(NamedTuple):
    """Saved by `gelu` for backward: x. Phi and its derivative are computed from x."""

    x: Array
    approximate: str

    def backward(self, dy: Array) -> Array:
        """dx = dy * (Phi(x) + x * Phi'(x))."""
        require_gradient("gelu", "dy", dy, self.x)
        xp = array_namespace(dy)
        x = clip(self.x, -FAR, FAR)
        phi = _phi(x, self.approximate)
        if self.approximate == "none":
            density = xp.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
        else:  # of the sigmoid: Phi (1 - Phi) times the derivative of its argument
            density = 2 * phi * (1 - phi) * SCALE * (1 + 3 * CUBIC * x**2)
        return dy * (phi + x * density)


def _phi(x: Array, approximate: str) -> Array:
    if approximate == "none":
        return 0.5 * (1 + ops.erf(x / math.sqrt(2))[0])
    return stable_sigmoid(2 * SCALE * x * (1 + CUBIC * x**2))
