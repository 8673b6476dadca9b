"""Matmuls by cuBLAS that copy no factor that cuBLAS can read, and the switch for TF32.

    with tf32():
        loss, cache = model.loss(params, tokens, targets)
        grads = cache.backward()

Matmuls are `a.dot(b)` and `a.dot(b, out)` of two-dimensional arrays: CuPy then does not copy a
transposed factor, and writes directly to `out`. `@` takes longer to start, and copies if there are
more dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from xformer import backends
from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.module import contiguous
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.shapes import working_dtype


@contextmanager
def tf32() -> Iterator[None]:
    """Return a context in which matmuls of float32 matrices round their factors to TF32.

    TF32 has 10 bits of mantissa instead of 23, and uses tensor cores; sums stay in float32. The
    switch is CuPy's, for the whole process. After the context it has its earlier value; its default
    is CUPY_TF32 of the environment.

    Raises Unusable if CuPy is not installed, or there is no device.
    """
    backends.get("cupy")
    from xformer.backends.cupy import driver

    with driver.rounding_to_tf32():
        yield


class Gradients(NamedTuple):
    """The gradients of a linear map's parameters; None if a parameter is missing or not trained."""

    dw: Array | None  # (I, O)
    db: Array | None  # (O,)


NONE = Gradients(None, None)


class Products:
    """The matmuls of a linear map by CuPy's cuBLAS; bias and sums are separate launches."""

    def matrix(self, x: Array) -> Array:
        """Return x (N, M), or a copy if it is not contiguous by rows or by columns."""
        return x if x.flags.f_contiguous else contiguous(x)

    def rows(self, x: Array) -> Array:
        """Return x (..., D) as a contiguous matrix (N, D)."""
        return contiguous(flat(x))

    def affine(self, x: Array, w: Array, b: Array | None, out: Array | None = None) -> Array:
        """Return x w + b, written to `out` (N, O) if given; x: (N, I), w: (I, O), b: (O,)."""
        y = x.dot(w) if out is None else x.dot(w, out)
        return y if b is None else added(y, b)

    def back(self, dy: Array, w: Array, out: Array | None = None) -> Array:
        """Return dy w^T (N, I), written to `out` if given; dy: (N, O), w: (I, O)."""
        return dy.dot(w.T) if out is None else dy.dot(w.T, out)

    def parameters(
        self, x: Array | None, dy: Array, w: Array, has_b: bool, so_far: Gradients = NONE
    ) -> Gradients:
        """Return dw = x^T dy and db = sum of dy over its rows, both added to `so_far`.

        x: (N, I); None: no dw   dy: (N, O)   w: (I, O)   has_b: whether there is a db

        dw has the layout of w. So dw of a tied head, whose w is the transposed table, is the
        table's gradient without a copy. If dy has two bytes a number, dw is float32. But CuPy has
        no matmul with a float32 result: it sums in float32 and rounds once to two bytes.
        """
        dw = None
        if x is not None:
            dw = x.T.dot(dy) if w.flags.c_contiguous else dy.T.dot(x).T
            dw = added(so_far.dw, array_namespace(dw).astype(dw, working_dtype(dw), copy=False))
        return Gradients(dw, added(so_far.db, row_sums(dy)) if has_b else None)


def product_into(a: Array, b: Array, out: Array, *, add: bool = False) -> None:
    """Write out = a b, or out + a b if `add`; a b is rounded to the dtype of a first.

    a: (M, K)   b: (K, N)   out: (M, N), with any strides
    Factors that are not contiguous by rows or by columns are copied.
    """
    a, b = (x if x.flags.c_contiguous or x.flags.f_contiguous else contiguous(x) for x in (a, b))
    product = array_namespace(out).astype(a.dot(b), out.dtype, copy=False)
    if add:
        out += product
    else:
        out[...] = product


def flat(x: Array) -> Array:
    """Return x (..., D) as (N, D)."""
    return x if x.ndim == 2 else x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))


def added(total: Array | None, part: Array) -> Array:
    """Return total + part, added to `total` in place; `part` if `total` is None."""
    if total is None:
        return part
    total += part
    return total
