"""The gated linear unit of gpt-oss: SwiGLU with clamped inputs."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_cap, require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._pointwise import clip
from xformer.ops.quick_gelu import quick_gelu

LIMIT = 7.0  # of gpt-oss


@overridable
@shapes("gate (..., F)  up (..., F)")
def clamped_swiglu(
    gate: Array, up: Array, *, limit: float = LIMIT
) -> tuple[Array, ClampedSwigluCache]:
    """y = g * sigmoid(1.702 g) * (u + 1), g = min(gate, limit), u = clip(up, -limit, limit).

    Elementwise (gpt-oss, arXiv:2508.10925, section 2.2).

    gate, up, y: (..., F)
    ValueError unless limit is positive and finite, and if shapes differ.
    Derivation: docs/derivations/clamped_swiglu.md
    """
    limit = require_cap("clamped_swiglu", limit, "limit")
    act, _ = quick_gelu(array_namespace(gate).minimum(gate, limit))
    return act * (clip(up, -limit, limit) + 1), ClampedSwigluCache(gate, up, limit)


@short
class ClampedSwigluCache(NamedTuple):
    """Saved by `clamped_swiglu` for backward, which computes the activation again."""

    gate: Array  # (..., F)
    up: Array  # (..., F)
    limit: float

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """dgate = dy * (u + 1) * act'(g), 0 if gate > limit; dup = dy * act(g), 0 if |up| > limit.

        act is `quick_gelu`.
        """
        require_gradient("clamped_swiglu", "dy", dy, self.gate)
        gate, up, limit = self
        xp = array_namespace(dy)
        act, cache = quick_gelu(xp.minimum(gate, limit))
        dgate = cache.backward(dy * (clip(up, -limit, limit) + 1))
        return xp.where(gate > limit, 0.0, dgate), xp.where(xp.abs(up) > limit, 0.0, dy * act)
