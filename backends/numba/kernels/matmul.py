"""Products of batches of matrices in float32, which lie as they will."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends.numba.gemm import no_products
from xformer.backends.numba.kernels.gemm import Pair, emit_products, product, steps
from xformer.backends.numba.program.namespace import contiguous, reshape
from xformer.backends.numba.program.native import LINE, Native, native, numbers, part, words
from xformer.backends.numba.tuning import SPEED
from xformer.typing import Array

BATCH, ROWS, COLUMNS = range(3)  # what pieces are


def emit_matmul(y: Array, x: Array, w: Array) -> bool:
    """y (..., N, M) = x (..., N, K) w (..., K, M) as an instruction; False where there is none."""
    if any(array.dtype != np.float32 for array in (x, w)) or not y.size or no_products():
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
    layouts = (step for own in (x, w) for step in (own.strides[0], *(steps(own[0]) or ())))
    own = Native(batched, (size, n, m, k, cut, *layouts), pieces, blas=True)
    y.program.emit("matmul", _run, [y], [x, w], own)
    return True


def _batch(x: Array, lead: list[int], size: int) -> Array:
    """(size, N, K) of x, as `product` can read each."""
    every = x.view(np.broadcast_to(x.layout, (*lead, *x.shape[-2:])))
    x = reshape(every, (size, *x.shape[-2:]))
    return x if steps(x[0]) else contiguous(x)


def _run(y: Any, x: Any, w: Any) -> None:
    np.matmul(x, w, out=y.reshape(len(x), *y.shape[-2:]))


@native
def batched(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; x, w, how many, N, M, K, what pieces are; bytes between matrices, rows and columns."""
    at, a = words(args, 3), numbers(args, 11)
    n, m, k, cut = a[1], a[2], a[3], a[4]
    first, last, top, bottom, left, right = np.int64(0), a[0], np.int64(0), n, np.int64(0), m
    if cut == BATCH:
        first, last = part(a[0], piece, pieces, 1)
    elif cut == ROWS:
        top, bottom = part(n, piece, pieces, 1)
    else:
        left, right = part(m, piece, pieces, LINE)
    for i in range(first, last):
        x = at[1] + i * a[5] + top * a[6], a[6], a[7]
        w = at[2] + i * a[8] + left * a[10], a[9], a[10]
        y = at[0] + 4 * ((i * n + top) * m + left), 4 * m
        product(memory, x, w, False, y, (bottom - top, right - left, k))
