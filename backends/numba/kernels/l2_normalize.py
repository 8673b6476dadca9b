"""`l2_normalize`: rows divided by their norms. Each row is read once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.kernels.layout import (
    dense,
    fresh_in,
    in_order,
    order_of,
    program_of,
    unrecordable,
)
from xformer.backends.numba.kernels.norms import block, pieces_of
from xformer.backends.numba.program.native import Native, bits, float32s, native, part, real, words
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import number, require_axis, require_gradient
from xformer.ops.l2_normalize import L2NormalizeCache as ReferenceCache


def unsupported(x: Array, *, eps: float = 1e-12) -> str | None:
    """Return why the numba kernel of `l2_normalize` cannot run, or None if it can.

    It needs x in float32 that is no constant of the program.
    """
    return unrecordable(x)


@kernel(ops.l2_normalize, "numba.kernels", unsupported=unsupported)
def l2_normalize(x: Array, *, eps: float = 1e-12) -> tuple[Array, NumbaL2NormalizeCache]:
    """y = x / max(|x|, eps), |x| the Euclidean norm over the last axis."""
    eps = number("l2_normalize", "eps", eps, low=0)
    require_axis("l2_normalize", x, -1)
    program, x = program_of(x), dense(x, 1)
    order = order_of(x, 1)
    y = fresh_in(program, order, x.shape, x.dtype)
    norm = fresh_in(program, order, (*x.shape[:-1], 1), x.dtype)

    def run(y: Any, norm: Any, x: Any) -> None:
        y[...], cache = ops.l2_normalize.reference(x, eps=eps)
        norm[...] = cache.norm

    compiled = Native(
        forward, (x.size // x.shape[-1], x.shape[-1], bits(eps)), pieces_of(program, x)
    )
    program.emit("l2_normalize", run, [y, norm], [x], compiled)
    return y, NumbaL2NormalizeCache(y, norm, eps)


@short
class NumbaL2NormalizeCache(NamedTuple):
    """Saved by `l2_normalize` for backward; x is not needed."""

    y: Array  # (..., D)
    norm: Array  # (..., 1), of x
    eps: float

    def backward(self, dy: Array) -> Array:
        """dx = (dy - y * sum(dy * y)) / |x|, or dy / eps if |x| < eps."""
        y, norm, eps = self
        require_gradient("l2_normalize", "dy", dy, y)
        program, order = program_of(y, dy), order_of(y, 1)
        dx = fresh_in(program, order, y.shape, y.dtype)

        def run(dx: Any, y: Any, norm: Any, dy: Any) -> None:
            dx[...] = ReferenceCache(y, norm, eps).backward(dy)

        numbers = y.size // y.shape[-1], y.shape[-1], bits(eps)
        compiled = Native(backward, numbers, pieces_of(program, y))
        program.emit("l2_normalize backward", run, [dx], [y, norm, in_order(dy, order)], compiled)
        return dx


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Normalise a piece of the rows.

    outputs: y (N, D), norm (N,); inputs: x (N, D). integers: N, D, bits of eps.
    """
    a = words(args, 6)
    start, stop = part(a[3], piece, pieces, 1)
    _rows_forward(
        block(a[2], start, stop, a[4]),
        np.float32(real(a[5])),
        block(a[0], start, stop, a[4]),
        float32s(a[1] + 4 * start, (stop - start,)),
    )


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute dx of a piece of the rows.

    outputs: dx (N, D); inputs: y (N, D), norm (N,), dy (N, D). integers: N, D, bits of eps.
    """
    a = words(args, 7)
    start, stop = part(a[4], piece, pieces, 1)
    _rows_backward(
        block(a[1], start, stop, a[5]),
        float32s(a[2] + 4 * start, (stop - start,)),
        block(a[3], start, stop, a[5]),
        np.float32(real(a[6])),
        block(a[0], start, stop, a[5]),
    )


@rowwise
def _rows_forward(x: Any, eps: Any, y: Any, norm: Any) -> None:
    """Write y (n, D) and norm (n,) of the rows x (n, D)."""
    n, width = x.shape
    for i in range(n):
        total = np.float32(0)
        for j in range(width):
            total += x[i, j] * x[i, j]
        norm[i] = math.sqrt(total)
        length = max(norm[i], eps)
        for j in range(width):
            y[i, j] = x[i, j] / length


@rowwise
def _rows_backward(y: Any, norm: Any, dy: Any, eps: Any, dx: Any) -> None:
    """Write dx (n, D). y, dy: (n, D). norm: (n,)."""
    n, width = y.shape
    for i in range(n):
        projection, length = np.float32(0), max(norm[i], eps)  # projection: sum(dy * y)
        for j in range(width):
            projection += dy[i, j] * y[i, j]
        if norm[i] < eps:
            projection = np.float32(0)
        for j in range(width):
            dx[i, j] = (dy[i, j] - y[i, j] * projection) / length
