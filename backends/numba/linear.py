"""`linear` of a token or some on the threads of `advance`, where BLAS's own would spin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from xformer.backends.numba import gemm
from xformer.backends.numba.atomic import WORD, count, nothing_done, on_all, wait
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.vectors import SUMS, matrix_vector, vector_matrix
from xformer.backends.numpy import products
from xformer.backends.numpy.linear import LinearCache
from xformer.backends.numpy.threads import n_threads, run

from xformer.dispatch import keeps_nothing
from xformer.typing import Array

TOKENS = 4  # at most: with more of them a product of matrices is faster
SOME = products.FEW  # at most: NumPy's kernel gives more of them to these threads too
LARGE = 1 << 13  # weights that BLAS would wake a thread for
LEAST, MOST = 1 << 17, 1 << 19  # of a piece


def other(x: Array, w: Array, b: Array | None = None, *, fixed: bool = False) -> str | None:
    """Why the kernel cannot run."""
    n = math.prod(x.shape[:-1])
    if not keeps_nothing() or w.size < LARGE or n > SOME:
        return f"only within inference(), large weights and at most {SOME} vectors"
    if n > TOKENS and products.chosen() is not gemm.multiply:
        return f"more than {TOKENS} vectors only by tiles"
    if n > TOKENS and n * w.size <= gemm.SMALL:
        return "tiles are not for so small a product"
    if w.dtype != np.float32 or not w.flags.aligned:
        return "only float32"
    if 4 not in w.strides:
        return "only rows or columns that are contiguous"
    return None


def linear(
    x: Array, w: Array, b: Array | None = None, *, fixed: bool = False
) -> tuple[Array, LinearCache]:
    """Pieces of columns; of more than `TOKENS` vectors those of a product of matrices."""
    rows, (n_in, n_out) = np.ascontiguousarray(x.reshape(-1, x.shape[-1])), w.shape
    y = np.empty((len(rows), n_out), x.dtype)
    cache = LinearCache(None if fixed else x, w, b, x.shape)
    if len(rows) > TOKENS:
        run(products.product(rows, w, y, b))
        return y.reshape(*x.shape[:-1], n_out), cache
    threads = n_threads() if w.size > LEAST else 1
    given = rows, place_of(w), piece(n_in, n_out, threads), y
    on_all(columns, given, nothing_done(1), w, threads)
    if b is not None:
        y += b
    return y.reshape(*x.shape[:-1], n_out), cache


def place_of(w: Array) -> tuple[int, int, int]:
    """Where it is, and how many numbers there are from row to row and from column to column."""
    return w.ctypes.data, w.strides[0] // 4, w.strides[1] // 4


def piece(n_in: int, n_out: int, threads: int) -> int:
    """How many columns `columns` takes at once: no column depends on the cut."""
    share = max(LEAST // n_in, -(-n_out // threads))
    return -(-max(1, min(MOST // n_in, share)) // SUMS) * SUMS


@rowwise
def columns(x: Any, w: Any, size: int, y: Any, stages: Any) -> None:
    """Pieces of y = x w, `size` columns each, until none is left. w: as `place_of` has it."""
    (at, down, across), n_out = w, y.shape[1]
    stage = np.int64(stages.ctypes.data)
    n_pieces = -(-n_out // size)
    piece = count(stage)
    while piece < n_pieces:
        start, stop = piece * size, min(n_out, (piece + 1) * size)
        for i in range(len(x)):
            if across == 1:
                vector_matrix(x[i], at + 4 * start, down, y[i, start:stop])
            else:
                matrix_vector(at + 4 * start * across, across, x[i], y[i, start:stop])
        count(stage + WORD)
        piece = count(stage)
    wait(stage, n_pieces)
