"""Matrices as cuBLAS reads them where they lie, and whether it may round them.

    with tf32():
        loss, cache = model.loss(params, tokens, targets)
        grads = cache.backward()

Products are `a.dot(b)` and `a.dot(b, out)` of two dimensions: CuPy then copies no transposed
factor, and writes to `out` itself. `@` takes longer to begin, and with more dimensions it copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from array_api_compat import array_namespace

from xformer import backends
from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.module import contiguous
from xformer.shapes import working_dtype
from xformer.typing import Array


@contextmanager
def tf32() -> Iterator[None]:
    """Within this context products of float32 matrices round their factors to TF32.

    To 10 bits behind the point in the place of 23, for tensor cores; sums stay in float32. It is
    CuPy's own switch, of the whole process; as it was before (unless set, by CUPY_TF32 of the
    environment) it is again afterwards. Unusable where there is no CuPy or no device.
    """
    backends.get("cupy")
    from xformer.backends.cupy import driver

    with driver.rounding_to_tf32():
        yield


class Gradients(NamedTuple):
    """Those of the parameters of a linear map; None: of none, or not wanted."""

    dw: Array | None  # (I, O)
    db: Array | None  # (O,)


NONE = Gradients(None, None)


class Products:
    """The products of a linear map by CuPy: cuBLAS's, and what it does not do behind them."""

    def matrix(self, x: Array) -> Array:
        """x (N, M) as they read it, copied where it lies otherwise."""
        return x if x.flags.f_contiguous else contiguous(x)

    def rows(self, x: Array) -> Array:
        """x (..., D) as a matrix (N, D)."""
        return contiguous(flat(x))

    def affine(self, x: Array, w: Array, b: Array | None, out: Array | None = None) -> Array:
        """x w + b of rows x (N, I), w (I, O), b (O,); written to `out` (N, O) if given."""
        y = x.dot(w) if out is None else x.dot(w, out)
        return y if b is None else added(y, b)

    def back(self, dy: Array, w: Array, out: Array | None = None) -> Array:
        """dy w^T (N, I)."""
        return dy.dot(w.T) if out is None else dy.dot(w.T, out)

    def parameters(
        self, x: Array | None, dy: Array, w: Array, has_b: bool, so_far: Gradients = NONE
    ) -> Gradients:
        """dw = x^T dy, None without x, and db = sums of dy over its rows, added to those so far.

        dw lies in memory as w does: that of a tied head, whose w is a transposed table, so becomes
        the table's without a copy. Of two-byte numbers it is float32, but CuPy has no product that
        gives it: sums are in float32, and rounded once to the two bytes.
        """
        dw = None
        if x is not None:
            dw = x.T.dot(dy) if w.flags.c_contiguous else dy.T.dot(x).T
            dw = added(so_far.dw, array_namespace(dw).astype(dw, working_dtype(dw), copy=False))
        return Gradients(dw, added(so_far.db, row_sums(dy)) if has_b else None)


def product_into(a: Array, b: Array, out: Array, *, add: bool = False) -> None:
    """out (M, N) = a (M, K) b (K, N), or with `add` out + a b, rounded as cuBLAS rounds a b.

    Whatever lies between rows; what cuBLAS cannot read is copied.
    """
    a, b = (x if x.flags.c_contiguous or x.flags.f_contiguous else contiguous(x) for x in (a, b))
    product = array_namespace(out).astype(a.dot(b), out.dtype, copy=False)
    if add:
        out += product
    else:
        out[...] = product


def flat(x: Array) -> Array:
    """x (..., D) as (N, D)."""
    return x if x.ndim == 2 else x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))


def added(total: Array | None, part: Array) -> Array:
    """total + part, in place where there is a total."""
    if total is None:
        return part
    total += part
    return total
