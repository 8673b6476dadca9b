"""`glu` with any activation, in blocks of elements that stay in a core's L1 cache.

With silu (SwiGLU), one loop computes everything without a temporary block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.compiled import LOG2_E, elementwise, exp2
from xformer.backends.numba.kernels.activations import (
    FORMULAS,
    FROM_OUTPUT,
    SWISH,
    activate_block,
    differentiate_block,
)
from xformer.backends.numba.kernels.layout import (
    dense,
    fresh_in,
    in_order,
    order_of,
    program_of,
    unrecordable,
)
from xformer.backends.numba.program.native import (
    LINE,
    Native,
    bits,
    float32s,
    native,
    part,
    real,
    words,
)
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.ops.glu import GluCache as ReferenceCache
from xformer.ops.silu import FAR

FAR32, ONE = np.float32(FAR), np.float32(1)
BLOCK = 2048  # elements: five blocks fit in a core's L1 cache


def unsupported(gate: Array, up: Array, *, activation: str = "silu") -> str | None:
    """Return why the numba kernel of `glu` cannot run, or None if it can.

    It needs float32 arrays, not both constants of the program, and an activation of `FORMULAS`.
    """
    return unrecordable(gate, up) if activation in FORMULAS else f"no activation {activation!r}"


@kernel(ops.glu, "numba.kernels", unsupported=unsupported)
def glu(gate: Array, up: Array, *, activation: str = "silu") -> tuple[Array, NumbaGluCache]:
    """y = act(gate) * up."""
    program, gate = program_of(gate, up), dense(gate)
    order = order_of(gate)
    up, y = in_order(up, order), fresh_in(program, order, gate.shape, gate.dtype)

    def run(y: Any, gate: Any, up: Any) -> None:
        np.copyto(y, ops.glu.reference(gate, up, activation=activation)[0])

    code, number = FORMULAS[activation]
    compiled = Native(forward, (y.size, code, bits(number)), program.pieces(y.size))
    program.emit(f"glu {activation}", run, [y], [gate, up], compiled)
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
        program, order = program_of(gate, up, dy), order_of(gate)
        dgate, dup = (fresh_in(program, order, gate.shape, gate.dtype) for _ in range(2))

        def run(dgate: Any, dup: Any, gate: Any, up: Any, dy: Any) -> None:
            dgate[...], dup[...] = ReferenceCache(gate, up, activation).backward(dy)

        code, number = FORMULAS[activation]
        compiled = Native(backward, (dup.size, code, bits(number)), program.pieces(dup.size))
        ins = [gate, up, in_order(dy, order)]
        program.emit(f"glu {activation} backward", run, [dgate, dup], ins, compiled)
        return dgate, dup


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute a piece of y = act(gate) * up. A `Kernel` (see `native`).

    outputs: y; inputs: gate, up. integers: the number of elements, the code of the activation
    (`FORMULAS`), the bits of its parameter c.
    """
    a = words(args, 6)
    number, act = real(a[5]), np.empty(BLOCK, np.float32)
    start, stop = part(a[3], piece, pieces, LINE)
    for first in range(start, stop, BLOCK):
        n = (min(BLOCK, stop - first),)
        y = float32s(a[0] + 4 * first, n)
        gate, up = float32s(a[1] + 4 * first, n), float32s(a[2] + 4 * first, n)
        if a[4] == SWISH and number == 1:
            _silu_forward(gate, up, y)
        else:
            activate_block(a[4], number, gate, act[: n[0]])
            _multiply(act[: n[0]], up, y)


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute a piece of dgate = dy * up * act'(gate) and dup = dy * act(gate).

    A `Kernel` (see `native`). outputs: dgate, dup; inputs: gate, up, dy. integers: the number of
    elements, the code of the activation (`FORMULAS`), the bits of its parameter c.
    """
    a = words(args, 8)
    number = real(a[7])
    start, stop = part(a[5], piece, pieces, LINE)
    acts, dacts = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for first in range(start, stop, BLOCK):
        n = (min(BLOCK, stop - first),)
        dgate, dup = float32s(a[0] + 4 * first, n), float32s(a[1] + 4 * first, n)
        gate, up = float32s(a[2] + 4 * first, n), float32s(a[3] + 4 * first, n)
        dy, y, dact = float32s(a[4] + 4 * first, n), acts[: n[0]], dacts[: n[0]]
        if a[6] == SWISH and number == 1:
            _silu_backward(gate, up, dy, dgate, dup)
        else:
            activate_block(a[6], number, gate, y)
            _multiply(dy, up, dact)
            differentiate_block(a[6], number, y if a[6] in FROM_OUTPUT else gate, dact, dgate)
            _multiply(dy, y, dup)


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
