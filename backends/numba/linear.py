"""`linear` of a token or a few on the threads of `advance`, where BLAS's own would spin."""

from __future__ import annotations

import math

import numpy as np
from xformer.backends.numba.vectors import matrix_vector, vector_matrix
from xformer.backends.numpy.linear import LinearCache
from xformer.backends.numpy.threads import blocks, n_threads

from xformer.dispatch import keeps_nothing
from xformer.typing import Array

TOKENS = 4  # at most: with more of them BLAS is faster
LARGE = 1 << 13  # weights that BLAS would wake a thread for
LEAST, MOST = 1 << 17, 1 << 19  # of a piece


def other(x: Array, w: Array, b: Array | None = None, *, fixed: bool = False) -> str | None:
    """Why the kernel cannot run."""
    if not keeps_nothing() or w.size < LARGE or math.prod(x.shape[:-1]) > TOKENS:
        return f"only within inference(), large weights and at most {TOKENS} vectors"
    if w.dtype != np.float32 or not w.flags.aligned:
        return "only float32"
    if 4 not in w.strides:
        return "only rows or columns that are contiguous"
    return None


def linear(
    x: Array, w: Array, b: Array | None = None, *, fixed: bool = False
) -> tuple[Array, LinearCache]:
    """Pieces of columns."""
    rows, (n_in, n_out) = np.ascontiguousarray(x.reshape(-1, x.shape[-1])), w.shape
    y = np.empty((len(rows), n_out), x.dtype)
    down, across = w.strides[0] // 4, w.strides[1] // 4

    def piece(start: int, stop: int) -> None:
        at = w.ctypes.data
        for row, out in zip(rows, y[:, start:stop], strict=True):
            if across == 1:
                vector_matrix(row, at + 4 * start, down, out)
            else:
                matrix_vector(at + 4 * start * across, across, row, out)

    if w.size <= LEAST:
        piece(0, n_out)
    else:
        share = max(LEAST // n_in, -(-n_out // n_threads()))  # no column depends on the cut
        blocks(piece, n_out, max(1, min(MOST // n_in, share)))
    if b is not None:
        y += b
    return y.reshape(*x.shape[:-1], n_out), LinearCache(None if fixed else x, w, b, x.shape)
