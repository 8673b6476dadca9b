"""`rope`, each row turned from where it lies: no copy of heads, of halves or of the rest."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.compiled import elementwise
from xformer.backends.numba.kernels.layout import (
    fresh_in,
    order_of,
    program_of,
    unrecordable,
)
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.ops.rope import RopeCache as ReferenceCache
from xformer.ops.rope import require_tables
from xformer.showing import short
from xformer.typing import Array

FLOAT = 4  # bytes


def unsupported(x: Array, *, cos: Array, sin: Array, interleaved: bool = False) -> str | None:
    """Why the kernel cannot run."""
    return unrecordable(x, cos, sin)


@kernel(ops.rope, "numba.kernels", unsupported=unsupported)
def rope(x: Array, *, cos: Array, sin: Array, interleaved: bool = False) -> tuple[Array, RopeCache]:
    """y lies in memory as x does."""
    require_tables(x, cos, sin)
    y = _turned("rope", x, cos, sin, interleaved, back=False)
    return y, RopeCache(cos, sin, interleaved, x.shape)


@short
class RopeCache(NamedTuple):
    """Saved by `rope` for backward: the tables, which all its calls share."""

    cos: Array  # (T, R/2) or (B, T, R/2)
    sin: Array  # like cos
    interleaved: bool
    shape: tuple[int, ...]  # (B, H, T, K)

    def backward(self, dy: Array) -> Array:
        """dy turned back."""
        require_gradient("rope", "dy", dy, self.cos, self.shape)
        return _turned("rope backward", dy, self.cos, self.sin, self.interleaved, back=True)


def _turned(name: str, x: Array, cos: Array, sin: Array, interleaved: bool, *, back: bool) -> Array:
    program = program_of(x, cos, sin)
    x, cos, sin = _inner(x), contiguous(cos), contiguous(sin)
    order = order_of(x, 1)
    y = fresh_in(program, order, x.shape, x.dtype)
    half = cos.shape[-1]
    table = cos.layout if cos.ndim == 2 else cos.layout[:, None]
    steps = np.broadcast_to(table, (*x.shape[:3], half)).strides  # 0 from head to head
    outer = [(x.shape[i], x.strides[i], steps[i]) for i in order[:3]]

    def run(y: Any, x: Any, cos: Any, sin: Any) -> None:
        if back:
            y[...] = ReferenceCache(cos, sin, interleaved, x.shape).backward(x)
        else:
            y[...] = ops.rope.reference(x, cos=cos, sin=sin, interleaved=interleaved)[0]

    numbers = (*np.transpose(outer).ravel().tolist(), x.shape[3], half, interleaved, back)
    own = Native(turn, numbers, program.pieces(x.size))
    program.emit(name, run, [y], [x, cos, sin], own)
    return y


def _inner(x: Array) -> Array:
    """x, or a copy where a row has gaps."""
    return x if x.strides[-1] == FLOAT or x.shape[-1] <= 1 else contiguous(x)


@native
def turn(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; x, cos, sin; sizes, steps of x, of a table, of three axes; K, R/2, whether 2i, or back."""
    a = words(args, 17)
    n, x_steps, steps, width, half = a[4:7], a[7:10], a[10:13], a[13], a[14]
    start, stop = part(n[0] * n[1] * n[2], piece, pieces, 1)
    for row in range(start, stop):
        i, j, k = row // (n[1] * n[2]), row // n[2] % n[1], row % n[2]
        at = i * steps[0] + j * steps[1] + k * steps[2]
        _row(
            float32s(a[1] + i * x_steps[0] + j * x_steps[1] + k * x_steps[2], (width,)),
            float32s(a[2] + at, (half,)),
            float32s(a[3] + at, (half,)),
            np.float32(-1 if a[16] else 1),
            a[15],
            float32s(a[0] + FLOAT * row * width, (width,)),
        )


@elementwise
def _row(x: Any, cos: Any, sin: Any, sign: Any, interleaved: int, y: Any) -> None:
    half = cos.size
    if interleaved:
        for i in range(half):
            a, b, s = x[2 * i], x[2 * i + 1], sign * sin[i]
            y[2 * i] = a * cos[i] - b * s
            y[2 * i + 1] = b * cos[i] + a * s
    else:
        low, high = x[:half], x[half : 2 * half]
        for i in range(half):
            s = sign * sin[i]
            y[i] = low[i] * cos[i] - high[i] * s
            y[half + i] = high[i] * cos[i] + low[i] * s
    for i in range(2 * half, x.size):
        y[i] = x[i]
