"""`linear` and `linear_cross_entropy` by cuBLASLt, which fuses further work with the matmuls.

- Forward, the matmul adds the bias.
- Backward, the matmul sums the bias gradient, writes a float32 gradient of a two-byte weight, and
  adds to dw of earlier chunks of rows.

Several linear maps of one x are in `linear_many_lt`.
"""

from __future__ import annotations

from typing import Any

from xformer import ops
from xformer.backends.cupy import linear as by_cublas
from xformer.backends.cupy import linear_cross_entropy as head
from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.cublaslt import multiply, readable, why_not
from xformer.backends.cupy.lt_plan import layout
from xformer.backends.cupy.module import contiguous, empty
from xformer.backends.cupy.products import NONE, Gradients, Products, added, flat
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.shapes import STORED, working_dtype
from xformer.ops._loss import loss_options


class FusedProducts(Products):
    """The matmuls of a linear map by cuBLASLt.

    It reads matrices with gaps between rows without a copy, and rounds each result once.
    """

    def matrix(self, x: Array) -> Array:
        """Return x (N, M), or a copy if neither its rows nor its columns are contiguous."""
        return readable(x)

    def rows(self, x: Array) -> Array:
        """Return x (..., D) as a matrix (N, D)."""
        return readable(flat(x))

    def affine(self, x: Array, w: Array, b: Array | None, out: Array | None = None) -> Array:
        """Return x w + b, written to `out` (N, O) if given; x: (N, I), w: (I, O), b: (O,)."""
        y = empty(x, (x.shape[0], w.shape[1])) if out is None else out
        multiply(x, w, y, bias=None if b is None else contiguous(b))
        return y

    def back(self, dy: Array, w: Array, out: Array | None = None, *, add: bool = False) -> Array:
        """Return dy w^T (N, I), written to `out` if given; if `add`, out + dy w^T."""
        dx = empty(dy, (dy.shape[0], w.shape[0])) if out is None else out
        multiply(dy, w.T, dx, add=add)
        return dx

    def parameters(
        self, x: Array | None, dy: Array, w: Array, has_b: bool, so_far: Gradients = NONE
    ) -> Gradients:
        """Return dw = x^T dy and db = sum of dy over its rows, both added to `so_far`.

        x: (N, I); None: no dw   dy: (N, O)   has_b: whether there is a db
        w: (I, O); dw has its layout. Gradients of two-byte weights are float32.
        """
        if x is None:
            return Gradients(None, added(so_far.db, row_sums(contiguous(dy))) if has_b else None)
        real, dw, add = working_dtype(dy), so_far.dw, so_far.dw is not None
        if dw is None:
            by_rows = layout(w)[0]  # type: ignore[index]  # not None, since forward multiplied by w
            dw = empty(w, w.shape, real) if by_rows else empty(w, w.shape[::-1], real).T
        db = empty(dy, w.shape[1:], real) if has_b else None
        multiply(x.T, dy, dw, add=add, sums=db)
        return Gradients(dw, None if db is None else added(so_far.db, db))


PRODUCTS = FusedProducts()


def linear_unsupported(
    x: Array, w: Array, b: Array | None = None, *, trainable: bool = True
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return why_not(x, w)


@kernel(ops.linear, "cupy", unsupported=linear_unsupported, storage_dtypes=STORED)
def linear(
    x: Array, w: Array, b: Array | None = None, *, trainable: bool = True
) -> tuple[Array, by_cublas.CupyLinearCache]:
    """Return (y = x w + b, cache).

    x: (..., I)   w: (I, O)   b: (O,)
    trainable: whether w is trained; if not, x is not saved and dw is None
    """
    return by_cublas.forward(PRODUCTS, x, w, b, trainable)


# ---- The head ----


def head_unsupported(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    trainable: bool = True,
    **options: Any,
) -> str | None:
    """Return why cuBLASLt's `linear_cross_entropy` cannot run, or None if it can."""
    return why_not(x, w) or head.unsupported(x, w, b, targets=targets, **options)


@kernel(ops.linear_cross_entropy, "cupy", unsupported=head_unsupported, storage_dtypes=STORED)
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    trainable: bool = True,
    **options: Any,
) -> tuple[Array, head.CupyLinearCrossEntropyCache | None]:
    """Return (loss, cache). The cache holds the gradients; it is None within `inference()`.

    x: (..., D)   w: (D, V)   b: (V,)   targets: (...), integers
    trainable: whether w is trained
    """
    return head.forward(PRODUCTS, x, w, b, targets, loss_options(**options), trainable)
