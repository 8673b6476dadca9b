"""`linear` and `linear_cross_entropy` by cuBLASLt, which fuses what cuBLAS leaves over.

Forward the bias; backward its gradient, the float32 gradient of a weight in two bytes, and sums of
products: of dw over chunks of rows. Several maps of one x are in `linear_many_lt`.
"""

from __future__ import annotations

from xformer import ops
from xformer.backends.cupy import linear as by_cublas
from xformer.backends.cupy import linear_cross_entropy as head
from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.cublaslt import multiply, readable, why_not
from xformer.backends.cupy.lt_plan import layout
from xformer.backends.cupy.module import contiguous, empty
from xformer.backends.cupy.products import NONE, Gradients, Products, added, flat
from xformer.dispatch import kernel
from xformer.shapes import STORED, working_dtype
from xformer.typing import Array


class FusedProducts(Products):
    """The same by cuBLASLt: of matrices with gaps between rows, and rounded once."""

    def matrix(self, x: Array) -> Array:
        """x (N, M), copied where neither rows nor columns are contiguous."""
        return readable(x)

    def rows(self, x: Array) -> Array:
        """x (..., D) as a matrix (N, D)."""
        return readable(flat(x))

    def affine(self, x: Array, w: Array, b: Array | None, out: Array | None = None) -> Array:
        """x w + b; the bias is contiguous."""
        y = empty(x, (x.shape[0], w.shape[1])) if out is None else out
        multiply(x, w, y, bias=None if b is None else contiguous(b))
        return y

    def back(self, dy: Array, w: Array, out: Array | None = None, *, add: bool = False) -> Array:
        """dy w^T, with `add` out + dy w^T."""
        dx = empty(dy, (dy.shape[0], w.shape[0])) if out is None else out
        multiply(dy, w.T, dx, add=add)
        return dx

    def parameters(
        self, x: Array | None, dy: Array, w: Array, has_b: bool, so_far: Gradients = NONE
    ) -> Gradients:
        """dw = x^T dy + dw so far, in float32, and with it sums of dy over its rows."""
        if x is None:
            return Gradients(None, added(so_far.db, row_sums(contiguous(dy))) if has_b else None)
        real, dw, add = working_dtype(dy), so_far.dw, so_far.dw is not None
        if dw is None:
            by_rows = layout(w)[0]  # type: ignore[index]  # it has one: it was multiplied by
            dw = empty(w, w.shape, real) if by_rows else empty(w, w.shape[::-1], real).T
        db = empty(dy, w.shape[1:], real) if has_b else None
        multiply(x.T, dy, dw, add=add, sums=db)
        return Gradients(dw, None if db is None else added(so_far.db, db))


PRODUCTS = FusedProducts()


def linear_unsupported(
    x: Array, w: Array, b: Array | None = None, *, fixed: bool = False
) -> str | None:
    """Why the kernel cannot run."""
    return why_not(x, w)


@kernel(ops.linear, "cupy", unsupported=linear_unsupported, storage_dtypes=STORED)
def linear(
    x: Array, w: Array, b: Array | None = None, *, fixed: bool = False
) -> tuple[Array, by_cublas.LinearCache]:
    """y = x w + b."""
    return by_cublas.forward(PRODUCTS, x, w, b, fixed)


# ---- The head ----


def head_unsupported(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    fixed: bool = False,
) -> str | None:
    """Why the kernel cannot run."""
    return why_not(x, w) or head.unsupported(x, w, targets=targets, reduction=reduction)


@kernel(ops.linear_cross_entropy, "cupy", unsupported=head_unsupported, storage_dtypes=STORED)
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    fixed: bool = False,
) -> tuple[Array, head.LinearCrossEntropyCache | None]:
    """The loss, and its gradients unless within `inference()`."""
    options = head.Options(targets, ignore_index, label_smoothing, z_loss, reduction)
    return head.forward(PRODUCTS, x, w, b, options, fixed)
