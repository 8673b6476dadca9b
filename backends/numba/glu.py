"""`glu` with silu (SwiGLU), each element once through all of its formula."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.compiled import BLOCK, LOG2_E, elementwise, exp2
from xformer.backends.numpy.rows import flat
from xformer.backends.numpy.threads import blocks

from xformer.checks import require_gradient
from xformer.ops.silu import FAR
from xformer.typing import Array

FAR32, ONE = np.float32(FAR), np.float32(1)


def not_float32_silu(gate: Array, up: Array, *, activation: str = "silu") -> str | None:
    """Why the kernel cannot run."""
    return None if activation == "silu" and gate.dtype == np.float32 else "only silu in float32"


def glu(gate: Array, up: Array, *, activation: str = "silu") -> tuple[Array, GluCache]:
    """y = gate / (1 + exp(-gate)) * up."""
    y = np.empty(gate.shape, gate.dtype)
    arrays = [flat(gate), flat(up), y.reshape(-1)]
    blocks(lambda a, b: _forward(*(x[a:b] for x in arrays)), y.size, BLOCK)
    return y, GluCache(gate, up)


class GluCache(NamedTuple):
    """What `glu` keeps for its backward."""

    gate: Array  # (..., F)
    up: Array  # (..., F)

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """dgate = dy * up * s * (1 + gate * (1 - s)), dup = dy * gate * s, s = sigmoid(gate)."""
        require_gradient("glu", "dy", dy, self.gate)
        dgate, dup = np.empty(dy.shape, dy.dtype), np.empty(dy.shape, dy.dtype)
        arrays = [*map(flat, (self.gate, self.up, dy)), dgate.reshape(-1), dup.reshape(-1)]
        blocks(lambda a, b: _backward(*(x[a:b] for x in arrays)), dy.size, BLOCK)
        return dgate, dup


@elementwise
def _forward(gate: Any, up: Any, y: Any) -> None:
    for i in range(gate.size):
        g = max(gate[i], -FAR32)
        y[i] = g / (ONE + exp2(-LOG2_E * g)) * up[i]


@elementwise
def _backward(gate: Any, up: Any, dy: Any, dgate: Any, dup: Any) -> None:
    for i in range(gate.size):
        g = max(gate[i], -FAR32)
        near = min(g, FAR32)
        s = ONE / (ONE + exp2(-LOG2_E * near))
        dgate[i] = dy[i] * up[i] * s * (ONE + near * (ONE - s))
        dup[i] = dy[i] * g * s
