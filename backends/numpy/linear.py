"""`linear` in pieces of rows, or of columns, each with its bias while it is in the cache.

On the threads of `threads.blocks`: those of BLAS wait by spinning, and would take time from these.
Except where a text is written token by token: there nothing but products wants more than one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from xformer.backends.numpy.products import product
from xformer.backends.numpy.threads import run

from xformer.checks import require_gradient
from xformer.dispatch import keeps_nothing, kernel
from xformer.ops.linear import linear as reference
from xformer.typing import Array

FEW = 16  # rows, whose product takes as long as reading w


@kernel(reference, "numpy")
def linear(
    x: Array, w: Array, b: Array | None = None, *, fixed: bool = False
) -> tuple[Array, LinearCache]:
    """Pieces of y, each of them by one thread."""
    rows = _rows(x)
    y = np.empty((len(rows), w.shape[1]), x.dtype)
    if keeps_nothing() and len(rows) <= FEW:
        np.matmul(rows, w, out=y)
        if b is not None:
            y += b
    else:
        run(product(rows, w, y, b))
    cache = LinearCache(None if fixed else x, w, b is not None, x.shape)
    return y.reshape(*x.shape[:-1], w.shape[1]), cache


class LinearCache(NamedTuple):
    """What `linear` keeps for its backward."""

    x: Array | None  # (..., I); None: w is not trained
    w: Array  # (I, O)
    has_b: bool
    x_shape: tuple[int, ...]

    def backward(self, dy: Array) -> tuple[Array, Array | None, Array | None]:
        """dx = dy w^T, dw = x^T dy, db = sum of dy over its rows: pieces of all three at once."""
        require_gradient("linear", "dy", dy, self.w, (*self.x_shape[:-1], self.w.shape[1]))
        rows, dw, db = _rows(dy), None, None
        dx = np.empty((len(rows), self.w.shape[0]), dy.dtype)
        pieces = product(rows, self.w.T, dx)
        if self.x is not None:
            dw = np.empty_like(self.w, dy.dtype)  # as w lies in memory: a tied head's lies sideways
            pieces += product(_rows(self.x).T, rows, dw)
        if self.has_b:
            db = np.empty(rows.shape[1], dy.dtype)
            pieces += product(np.ones((1, len(rows)), dy.dtype), rows, db[None])
        run(pieces)
        return dx.reshape(self.x_shape), dw, db


def _rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
