"""`linear` with its bias added in place, and gradients that lie in memory as their weights do."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from xformer.backends.numpy.rows import Sums, row_blocks

from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.ops.linear import linear as reference
from xformer.typing import Array


@kernel(reference, "numpy")
def linear(
    x: Array, w: Array, b: Array | None = None, *, fixed: bool = False
) -> tuple[Array, LinearCache]:
    """One product over all rows, then b on all threads."""
    y = _rows(x) @ w

    def add(start: int, stop: int) -> None:
        y[start:stop] += b

    if b is not None:
        row_blocks(add, *y.shape)
    shape = (*x.shape[:-1], w.shape[1])
    return y.reshape(shape), LinearCache(None if fixed else x, w, b is not None, x.shape)


class LinearCache(NamedTuple):
    """What `linear` keeps for its backward."""

    x: Array | None  # (..., I); None: w is not trained
    w: Array  # (I, O)
    has_b: bool
    x_shape: tuple[int, ...]

    def backward(self, dy: Array) -> tuple[Array, Array | None, Array | None]:
        """dx = dy w^T, dw = x^T dy, db = sum of dy over its rows."""
        require_gradient("linear", "dy", dy, self.w, (*self.x_shape[:-1], self.w.shape[1]))
        rows, dw = _rows(dy), None
        dx = (rows @ self.w.T).reshape(self.x_shape)
        if self.x is not None:
            # The table of a tied head comes transposed: its two gradients are added.
            x, sideways = _rows(self.x), self.w.flags.f_contiguous
            dw = (rows.T @ x).T if sideways else x.T @ rows
        return dx, dw, _sum(rows) if self.has_b else None


def _sum(dy: Array) -> Array:
    """The sum over rows, as products with ones."""
    sums = Sums(dy.shape[0], dy.shape[1], dy.dtype)

    def piece(start: int, stop: int) -> None:
        np.matmul(np.ones(stop - start, dy.dtype), dy[start:stop], out=sums.of(start))

    row_blocks(piece, *dy.shape)
    return sums.total()


def _rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
