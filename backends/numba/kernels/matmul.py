"""Batched matmuls in float32, of matrices of any layout."""

from __future__ import annotations

import math

import numpy as np

from xformer.backends.numba.kernels.gemm import Pair, emit_products, matrix_strides, product
from xformer.backends.numba.matmul import matmul_unsupported
from xformer.backends.numba.program.copies import contiguous, reshape
from xformer.backends.numba.program.native import LINE, Native, native, numbers, part, words
from xformer.backends.numba.tuning import SPEED
from xformer.base.typing import Array

BATCH, ROWS, COLUMNS = range(3)  # the axis of y that is cut into pieces


def emit_matmul(y: Array, x: Array, w: Array) -> bool:
    """Record y (..., N, M) = x (..., N, K) w (..., K, M); return False if no kernel can."""
    if any(array.dtype != np.float32 for array in (x, w)) or not y.size or matmul_unsupported():
        return False
    *lead, n, m = y.shape
    k, size = x.shape[-1], math.prod(lead)
    if w.ndim == 2:
        rows = Pair(reshape(x, (size * n, k)), w)
        emit_products("matmul", reshape(y, (size * n, m)), [rows])
        return True
    x, w = (_batch(array, lead, size) for array in (x, w))
    pieces = y.program.pieces(y.size * k // SPEED)
    cut = BATCH if size >= pieces else ROWS if n >= m else COLUMNS
    layouts = (stride for a in (x, w) for stride in (a.strides[0], *(matrix_strides(a[0]) or ())))
    compiled = Native(batched, (size, n, m, k, cut, *layouts), pieces, blas=True)
    y.program.emit("matmul", [y], [x, w], compiled)
    return True


def _batch(x: Array, lead: list[int], size: int) -> Array:
    """Return x, broadcast to the batch axes `lead`, as (size, N, K) that `product` can read."""
    whole = x.view(np.broadcast_to(x.layout, (*lead, *x.shape[-2:])))
    x = reshape(whole, (size, *x.shape[-2:]))
    return x if matrix_strides(x[0]) else contiguous(x)


@native
def batched(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute a piece of a batch of matmuls y = x w.

    outputs: y (B, N, M); inputs: x (B, N, K), w (B, K, M). integers: B, N, M, K, the axis that is
    cut (`BATCH`, ...), then strides in bytes between matrices, rows and columns of x, and of w.
    """
    ptr, a = words(args, 3), numbers(args, 11)
    n, m, k, cut = a[1], a[2], a[3], a[4]
    first, last, row0, row1, column0, column1 = np.int64(0), a[0], np.int64(0), n, np.int64(0), m
    if cut == BATCH:
        first, last = part(a[0], piece, pieces, 1)
    elif cut == ROWS:
        row0, row1 = part(n, piece, pieces, 1)
    else:
        column0, column1 = part(m, piece, pieces, LINE)
    for i in range(first, last):
        x = ptr[1] + i * a[5] + row0 * a[6], a[6], a[7]
        w = ptr[2] + i * a[8] + column0 * a[10], a[9], a[10]
        y = ptr[0] + 4 * ((i * n + row0) * m + column0), 4 * m
        product(memory, x, w, False, y, (row1 - row0, column1 - column0, k))
