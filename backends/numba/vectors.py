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

ROWS = 8


@rowwise
def vector_matrix(x: Any, w: int, step: int, out: Any) -> None:
    """out = x w, of w (I, O): the sum of what `ROWS` of its rows give, for exactness.

    One row after the other, as they lie: of several at once memory gives half as much a second.
    """
    few = np.empty(len(out), np.float32)
    out[:] = ZERO
    for first in range(0, len(x), ROWS):
        few[:] = ZERO
        for i in range(first, min(first + ROWS, len(x))):
            row = floats(w + 4 * i * step, (len(out),))
            for j in range(len(out)):
                few[j] += x[i] * row[j]
        for j in range(len(out)):
            out[j] += few[j]


@rowwise
def matrix_vector(w: int, step: int, x: Any, out: Any) -> None:
    """out = w x, of w (O, I)."""
    for j in range(len(out)):
        out[j] = dot(floats(w + 4 * j * step, (len(x),)), x)
