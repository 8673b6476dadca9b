"""Products of a vector and a matrix, which take as long as reading the matrix.

BLAS has them too; but its threads spin where others compute, and its calls take longer than small
products. A matrix goes by its address, and how many numbers there are from one row to the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.atomic import floats
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.flash_rows import ZERO, dot

ROWS = 256


@rowwise
def vector_matrix(x: Any, w: int, step: int, out: Any) -> None:
    """out = x w, of w (I, O): the sum of what `ROWS` of its rows give, for exactness."""
    if len(x) <= ROWS:
        _few_rows(x, w, step, out)
        return
    more = np.empty(len(out), np.float32)
    out[:] = ZERO
    for i in range(0, len(x), ROWS):
        _few_rows(x[i : i + ROWS], w + 4 * i * step, step, more)
        for j in range(len(out)):
            out[j] += more[j]


@rowwise
def _few_rows(x: Any, w: int, step: int, out: Any) -> None:
    """Eight of them at a time."""
    width, down = (len(out),), 4 * step
    n = len(x) - len(x) % 8
    out[:] = ZERO
    for i in range(0, n, 8):
        x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
        x4, x5, x6, x7 = x[i + 4], x[i + 5], x[i + 6], x[i + 7]
        at = w + i * down
        w0, w1 = floats(at, width), floats(at + down, width)
        w2, w3 = floats(at + 2 * down, width), floats(at + 3 * down, width)
        w4, w5 = floats(at + 4 * down, width), floats(at + 5 * down, width)
        w6, w7 = floats(at + 6 * down, width), floats(at + 7 * down, width)
        for j in range(len(out)):
            out[j] += (x0 * w0[j] + x1 * w1[j] + x2 * w2[j] + x3 * w3[j]) + (
                x4 * w4[j] + x5 * w5[j] + x6 * w6[j] + x7 * w7[j]
            )
    for i in range(n, len(x)):
        row = floats(w + i * down, width)
        for j in range(len(out)):
            out[j] += x[i] * row[j]


@rowwise
def matrix_vector(w: int, step: int, x: Any, out: Any) -> None:
    """out = w x, of w (O, I)."""
    for j in range(len(out)):
        out[j] = dot(floats(w + 4 * j * step, (len(x),)), x)
