"""`linear` by matmuls of two-dimensional arrays that copy no factor; the bias is added in place."""

from __future__ import annotations

from typing import NamedTuple

from xformer.backends.cupy.products import Products
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import STORED
from xformer.ops.linear import linear as reference


@kernel(reference, "cupy", storage_dtypes=STORED)
def linear(
    x: Array, w: Array, b: Array | None = None, *, trainable: bool = True
) -> tuple[Array, CupyLinearCache]:
    """Return (y = x w + b, cache).

    x: (..., I)   w: (I, O)   b: (O,)
    trainable: whether w is trained; if not, x is not saved and dw is None
    """
    return forward(Products(), x, w, b, trainable)


def forward(
    products: Products, x: Array, w: Array, b: Array | None, trainable: bool
) -> tuple[Array, CupyLinearCache]:
    """Return (y = x w + b, cache) of `linear`, by the matmuls of `products`."""
    w = products.matrix(w)
    y = products.affine(products.rows(x), w, b)
    cache = CupyLinearCache(x if trainable else None, w, b is not None, x.shape, products)
    return y.reshape((*x.shape[:-1], w.shape[1])), cache


@short
class CupyLinearCache(NamedTuple):
    """Saved by `linear` for backward: x for dw (not if w is not trained), and w for dx."""

    x: Array | None  # (..., I); None: w is not trained
    w: Array  # (I, O)
    has_b: bool
    x_shape: tuple[int, ...]
    products: Products  # computes the matmuls of backward

    def backward(self, dy: Array) -> tuple[Array, Array | None, Array | None]:
        """Return dx = dy w^T, dw = x^T dy (None if w is not trained), db = sum of dy over its rows.

        dy: (..., O)
        """
        require_gradient("linear", "dy", dy, self.w, (*self.x_shape[:-1], self.w.shape[1]))
        rows = self.products.rows(dy)
        dx = self.products.back(rows, self.w).reshape(self.x_shape)
        x = None if self.x is None else self.products.rows(self.x)
        return dx, *self.products.parameters(x, rows, self.w, self.has_b)
