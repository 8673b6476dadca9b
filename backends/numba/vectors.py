"""Products of a vector and a matrix, which take as long as reading the matrix.

BLAS has them too, but its waiting threads occupy cores, and a call takes longer than a small
product. A matrix is passed as its address `w` and `step`, the number of elements between rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.atomic import floats
from xformer.backends.numba.flash_rows import ZERO, dot
from xformer.backends.numba.jit import elementwise, rowwise, summing
from xformer.backends.numba.tuning import TOGETHER

ROWS, SUMS = 8, 4  # rows that are read at once: by `vector_matrix`, by `matrix_vector`


@rowwise
def vector_matrix(x: Any, w: int, step: int, out: Any) -> None:
    """Compute out = x w, w (I, O). Each `ROWS` rows are summed first, which is more exact."""
    block = np.empty(len(out), np.float32)
    out[:] = ZERO
    whole = len(x) // ROWS * ROWS if TOGETHER else 0
    for first in range(0, whole, ROWS):
        _add_together(x[first:], w + 4 * first * step, step, out)
    for first in range(whole, len(x), ROWS):
        block[:] = ZERO
        for i in range(first, min(first + ROWS, len(x))):
            row = floats(w + 4 * i * step, (len(out),))
            for j in range(len(out)):
                block[j] += x[i] * row[j]
        for j in range(len(out)):
            out[j] += block[j]


@elementwise
def _add_together(x: Any, w: int, step: int, out: Any) -> None:
    """Compute out += x w for the first `ROWS` rows of a float32 matrix, which are read together.

    x: float32, at least `ROWS` elements; the first `ROWS` are used
    w: the address of the matrix; a row has at least len(out) elements
    step: the number of float32 elements from one row to the next
    """
    x0, x1, x2, x3, x4, x5, x6, x7 = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
    rows = floats(w, (ROWS, step))
    w0, w1, w2, w3 = rows[0], rows[1], rows[2], rows[3]
    w4, w5, w6, w7 = rows[4], rows[5], rows[6], rows[7]
    for j in range(len(out)):
        first = x0 * w0[j] + x1 * w1[j] + (x2 * w2[j] + x3 * w3[j])
        last = x4 * w4[j] + x5 * w5[j] + (x6 * w6[j] + x7 * w7[j])
        out[j] += first + last


@rowwise
def matrix_vector(w: int, step: int, x: Any, out: Any) -> None:
    """Compute out = w x, w (O, I)."""
    whole = len(out) // SUMS * SUMS if TOGETHER else 0
    for j in range(0, whole, SUMS):
        _take_together(w + 4 * j * step, step, x, out[j : j + SUMS])
    for j in range(whole, len(out)):
        out[j] = dot(floats(w + 4 * j * step, (len(x),)), x)


@summing
def _take_together(w: int, step: int, x: Any, out: Any) -> None:
    """Compute out = w x for the first `SUMS` rows of a float32 matrix, which are read together.

    w: the address of the matrix; step: the number of float32 elements from one row to the next,
    at least len(x)
    """
    rows = floats(w, (SUMS, step))
    w0, w1, w2, w3 = rows[0], rows[1], rows[2], rows[3]
    y0 = y1 = y2 = y3 = ZERO
    for i in range(len(x)):
        y0 += w0[i] * x[i]
        y1 += w1[i] * x[i]
        y2 += w2[i] * x[i]
        y3 += w3[i] * x[i]
    out[0], out[1], out[2], out[3] = y0, y1, y2, y3
