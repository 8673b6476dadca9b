"""Gated linear units: SwiGLU, GEGLU, ReGLU and others."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops.activation import ACTIVATIONS, require_activation


@overridable
@shapes("gate (..., F)  up (..., F)")
def glu(gate: Array, up: Array, *, activation: str = "silu") -> tuple[Array, GluCache]:
    """y = act(gate) * up, elementwise (arXiv:2002.05202, eq. 5, after its two linear maps).

    gate, up, y: (..., F)
    activation: a name in `activation.ACTIVATIONS`. silu gives SwiGLU, gelu GEGLU, relu ReGLU,
        sigmoid GLU.

    ValueError for an unknown name, and if shapes differ. Derivation: docs/derivations/glu.md
    """
    act, _ = require_activation("glu", activation)(gate)
    return act * up, GluCache(gate, up, activation)


@short
class GluCache(NamedTuple):
    """Saved by `glu` for backward, which computes the activation again."""

    gate: Array  # (..., F)
    up: Array  # (..., F)
    activation: str

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """dgate = dact * act'(gate), with dact = dy * up; dup = dy * act(gate)."""
        require_gradient("glu", "dy", dy, self.gate)
        act, cache = ACTIVATIONS[self.activation](self.gate)
        return cache.backward(dy * self.up), dy * act
