"""`glu` with any activation, in blocks of elements that stay in a core's L1 cache.

With silu (SwiGLU), one loop computes everything without a temporary block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.jit import LOG2_E, elementwise, exp2
from xformer.backends.numba.kernels.activations import (
    FORMULAS,
    FROM_OUTPUT,
    SWISH,
    activate_block,
    differentiate_block,
)
from xformer.backends.numba.kernels.layout import (
    dense,
    in_order,
    order_of,
    record,
    recorded,
)
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.native import LINE
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
from xformer.ops.silu import FAR

FAR32, ONE = np.float32(FAR), np.float32(1)
BLOCK = 2048  # elements: five blocks fit in a core's L1 cache


def _refuses(gate: Array, up: Array, *, activation: str = "silu") -> str | None:
    return None if activation in FORMULAS else f"no activation {activation!r}"


@recorded(ops.glu, _refuses)
def glu(gate: Array, up: Array, *, activation: str = "silu") -> tuple[Array, NumbaGluCache]:
    """y = act(gate) * up."""
    gate = dense(gate)
    up = in_order(up, order_of(gate))
    code, c = FORMULAS[activation]
    (y,) = record(forward, f"glu {activation}", gate, up, code=code, c=c)
    return y, NumbaGluCache(gate, up, activation)


@short
class NumbaGluCache(NamedTuple):
    """Saved by `glu` for backward, which computes act(gate) again."""

    gate: Array  # (..., F)
    up: Array  # (..., F)
    activation: str

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """dgate = dact * act'(gate) with dact = dy * up; dup = dy * act(gate)."""
        gate, up, activation = self
        require_gradient("glu", "dy", dy, gate)
        code, c = FORMULAS[activation]
        name = f"glu {activation} backward"
        dgate, dup = record(backward, name, gate, up, dy, code=code, c=c)
        return dgate, dup


@declared("y (N) <- gate (N), up (N)", unit=LINE)
def forward(y: Any, gate: Any, up: Any, code: int, c: float) -> None:
    """Compute y = act(gate) * up. code, c: of the activation (`FORMULAS`)."""
    acts = np.empty(BLOCK, np.float32)
    for i in range(0, len(y), BLOCK):
        at = slice(i, i + BLOCK)
        act = acts[: len(y[at])]
        if code == SWISH and c == 1:
            _silu_forward(gate[at], up[at], y[at])
        else:
            activate_block(code, c, gate[at], act)
            _multiply(act, up[at], y[at])


@declared("dgate (N), dup (N) <- gate (N), up (N), dy (N)", unit=LINE)
def backward(dgate: Any, dup: Any, gate: Any, up: Any, dy: Any, code: int, c: float) -> None:
    """Compute dgate = dy * up * act'(gate) and dup = dy * act(gate)."""
    acts, dacts = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for i in range(0, len(dy), BLOCK):
        at = slice(i, i + BLOCK)
        y, dact = acts[: len(dy[at])], dacts[: len(dy[at])]
        if code == SWISH and c == 1:
            _silu_backward(gate[at], up[at], dy[at], dgate[at], dup[at])
        else:
            activate_block(code, c, gate[at], y)
            _multiply(dy[at], up[at], dact)
            differentiate_block(code, c, y if code in FROM_OUTPUT else gate[at], dact, dgate[at])
            _multiply(dy[at], y, dup[at])


@elementwise
def _multiply(x: Any, y: Any, out: Any) -> None:
    """Write out = x * y."""
    for i in range(out.size):
        out[i] = x[i] * y[i]


@elementwise
def _silu_forward(gate: Any, up: Any, y: Any) -> None:
    """Write y = silu(gate) * up."""
    for i in range(gate.size):
        g = max(gate[i], -FAR32)
        y[i] = g / (ONE + exp2(-LOG2_E * g)) * up[i]


@elementwise
def _silu_backward(gate: Any, up: Any, dy: Any, dgate: Any, dup: Any) -> None:
    """Write dgate = dy * up * silu'(gate) and dup = dy * silu(gate)."""
    for i in range(gate.size):
        g = max(gate[i], -FAR32)
        clipped = min(g, FAR32)
        sigmoid = ONE / (ONE + exp2(-LOG2_E * clipped))
        dgate[i] = dy[i] * up[i] * sigmoid * (ONE + clipped * (ONE - sigmoid))
        dup[i] = dy[i] * g * sigmoid
