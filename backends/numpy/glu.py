"""`glu` with silu (SwiGLU): all operations on a block run while it is in a core's cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xformer.backends.numpy.logistic import LOG2_E, clipped, inverse_sigmoid
from xformer.backends.numpy.rows import BLOCK, flat
from xformer.backends.numpy.threads import blocks, scratch
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.ops.glu import glu as reference
from xformer.ops.silu import FAR

SILU = (-LOG2_E,)


def unsupported(gate: Array, up: Array, *, activation: str = "silu") -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return None if activation == "silu" else "only silu"


@kernel(reference, "numpy", unsupported=unsupported)
def glu(gate: Array, up: Array, *, activation: str = "silu") -> tuple[Array, NumpyGluCache]:
    """y = gate / (1 + exp(-gate)) * up."""
    y = np.empty(gate.shape, gate.dtype)
    gates, ups, ys = flat(gate), flat(up), flat(y)

    def piece(start: int, stop: int) -> None:
        gate, y = gates[start:stop], ys[start:stop]
        near = clipped(gate, FAR)
        inverse_sigmoid(near, SILU, y, None)
        np.divide(gate if near is gate else np.maximum(gate, -FAR), y, out=y)  # 0 at -inf
        y *= ups[start:stop]

    with np.errstate(over="ignore"):  # exp2 overflows if the sigmoid is 0
        blocks(piece, ys.size, BLOCK)
    return y, NumpyGluCache(gate, up)


@short
class NumpyGluCache(NamedTuple):
    """Saved by `glu` for backward: its inputs. The sigmoid of gate is recomputed."""

    gate: Array  # (..., F)
    up: Array  # (..., F)

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """dgate = dy * up * s * (1 + gate * (1 - s)), dup = dy * gate * s, s = sigmoid(gate)."""
        require_gradient("glu", "dy", dy, self.gate)
        dgate, dup = np.empty(dy.shape, dy.dtype), np.empty(dy.shape, dy.dtype)
        arrays = [flat(a) for a in (self.gate, self.up, dy, dgate, dup)]

        def piece(start: int, stop: int) -> None:
            gate, up, dy, dgate, dup = (a[start:stop] for a in arrays)
            near = clipped(gate, FAR)
            s = inverse_sigmoid(near, SILU, scratch("sigmoid", gate.shape, gate.dtype), None)
            np.reciprocal(s, out=s)
            np.multiply(near, s, out=dup)
            np.subtract(1, s, out=dgate)
            dgate *= dup
            dgate += s
            dgate *= up
            dgate *= dy
            if near is not gate:
                np.multiply(np.maximum(gate, -FAR), s, out=dup)
            dup *= dy

        with np.errstate(over="ignore"):
            blocks(piece, dy.size, BLOCK)
        return dgate, dup
