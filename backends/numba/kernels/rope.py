"""`rope`: the kernel reads x by its strides, so that heads that are views are not copied."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.jit import elementwise
from xformer.backends.numba.kernels.layout import (
    fresh_in,
    order_of,
    recorded,
)
from xformer.backends.numba.program.copies import contiguous
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.backends.numba.program.program import program_of
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
from xformer.ops.rope import require_tables

FLOAT = 4  # bytes


@recorded(ops.rope)
def rope(
    x: Array, *, cos: Array, sin: Array, interleaved: bool = False
) -> tuple[Array, NumbaRopeCache]:
    """Rotate pairs of channels: (a, b) -> (a cos - b sin, b cos + a sin).

    y has the memory layout of x (B, H, T, K).
    """
    require_tables(x, cos, sin)
    y = _emit_rotation("rope", x, cos, sin, interleaved, back=False)
    return y, NumbaRopeCache(cos, sin, interleaved, x.shape)


@short
class NumbaRopeCache(NamedTuple):
    """Saved by `rope` for backward: only the tables, which all calls share."""

    cos: Array  # (T, R/2) or (B, T, R/2)
    sin: Array  # like cos
    interleaved: bool
    shape: tuple[int, ...]  # (B, H, T, K)

    def backward(self, dy: Array) -> Array:
        """dx = dy rotated by the negative angles."""
        require_gradient("rope", "dy", dy, self.cos, self.shape)
        return _emit_rotation("rope backward", dy, self.cos, self.sin, self.interleaved, back=True)


def _emit_rotation(
    name: str, x: Array, cos: Array, sin: Array, interleaved: bool, *, back: bool
) -> Array:
    """Record the rotation of x (B, H, T, K), and return y with the memory layout of x.

    name: of the instruction
    cos, sin: (T, R/2) or (B, T, R/2); the first R of the K channels are rotated
    interleaved: whether pairs are the channels (2i, 2i + 1), else (i, i + R/2)
    back: rotate by the negative angles, for the backward
    """
    program = program_of(x, cos, sin)
    x, cos, sin = _with_dense_rows(x), contiguous(cos), contiguous(sin)
    order = order_of(x, 1)
    y = fresh_in(program, order, x.shape, x.dtype)
    half = cos.shape[-1]
    table = cos.layout if cos.ndim == 2 else cos.layout[:, None]
    table_strides = np.broadcast_to(table, (*x.shape[:3], half)).strides  # 0 along heads
    outer = [(x.shape[i], x.strides[i], table_strides[i]) for i in order[:3]]
    numbers = (*np.transpose(outer).ravel().tolist(), x.shape[3], half, interleaved, back)
    compiled = Native(rotate, numbers, program.pieces(x.size))
    program.emit(name, [y], [x, cos, sin], compiled)
    return y


def _with_dense_rows(x: Array) -> Array:
    """Return x if the elements of its last axis are contiguous, else a copy."""
    return x if x.strides[-1] == FLOAT or x.shape[-1] <= 1 else contiguous(x)


@native
def rotate(args: int, piece: int, pieces: int, memory: int) -> None:
    """Rotate a piece of the rows of x; a row is the K channels of one head and token.

    The first R of the K channels are rotated, the other K - R are copied.

    args, piece, pieces, memory: see the module of `native`. args has:
    outputs: y (rows, K), contiguous. inputs: x, cos, sin.
    integers: the sizes of the three outer axes in the order of y; the strides of x, and then of the
        tables, along these axes, in bytes; K; R/2; 1 if pairs are interleaved, else 0; 1 to rotate
        back, else 0
    """
    a = words(args, 17)
    sizes, x_strides, table_strides, width, half = a[4:7], a[7:10], a[10:13], a[13], a[14]
    start, stop = part(sizes[0] * sizes[1] * sizes[2], piece, pieces, 1)
    for row in range(start, stop):
        i, j, k = row // (sizes[1] * sizes[2]), row // sizes[2] % sizes[1], row % sizes[2]
        offset = i * table_strides[0] + j * table_strides[1] + k * table_strides[2]
        _rotate_row(
            float32s(a[1] + i * x_strides[0] + j * x_strides[1] + k * x_strides[2], (width,)),
            float32s(a[2] + offset, (half,)),
            float32s(a[3] + offset, (half,)),
            np.float32(-1 if a[16] else 1),
            a[15],
            float32s(a[0] + FLOAT * row * width, (width,)),
        )


@elementwise
def _rotate_row(x: Any, cos: Any, sin: Any, sign: Any, interleaved: int, y: Any) -> None:
    """Write y (K,): x (K,) rotated. cos, sin: (R/2,). sign: 1, or -1 to rotate back."""
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
