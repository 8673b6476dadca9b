"""`linear`: products of two dimensions, of which none copies a factor; the bias added in place."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace
from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.products import added, matrix, row_matrix, weight_gradient

from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.ops.linear import linear as reference
from xformer.shapes import STORED
from xformer.typing import Array


@kernel(reference, "cupy", stores=STORED)
def linear(
    x: Array, w: Array, b: Array | None = None, *, fixed: bool = False
) -> tuple[Array, LinearCache]:
    """y = x w + b."""
    w = matrix(w)
    y = row_matrix(x).dot(w)
    if b is not None:
        y = added(y, b)
    cache = LinearCache(None if fixed else x, w, b is not None, x.shape)
    return array_namespace(x).reshape(y, (*x.shape[:-1], w.shape[1])), cache


class LinearCache(NamedTuple):
    """What `linear` keeps for its backward."""

    x: Array | None  # (..., I); None: w is not trained
    w: Array  # (I, O)
    has_b: bool
    x_shape: tuple[int, ...]

    def backward(self, dy: Array) -> tuple[Array, Array | None, Array | None]:
        """dx = dy w^T, dw = x^T dy, db = sum of dy over its rows."""
        require_gradient("linear", "dy", dy, self.w, (*self.x_shape[:-1], self.w.shape[1]))
        rows, dw = row_matrix(dy), None
        dx = array_namespace(dy).reshape(rows.dot(self.w.T), self.x_shape)
        if self.x is not None:
            dw = weight_gradient(row_matrix(self.x), rows, self.w)
        return dx, dw, row_sums(rows) if self.has_b else None
