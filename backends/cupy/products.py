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

from array_api_compat import array_namespace
from xformer.backends.cupy.module import contiguous

from xformer import backends
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


def matrix(x: Array) -> Array:
    """x (N, D), copied where neither it nor its transpose is contiguous."""
    return x if x.flags.f_contiguous else contiguous(x)


def row_matrix(x: Array) -> Array:
    """x (..., D) as (N, D), contiguous."""
    return contiguous(array_namespace(x).reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])))


def weight_gradient(x: Array, dy: Array, w: Array) -> Array:
    """x^T dy (I, O) of contiguous rows x (N, I), dy (N, O), lying in memory as w does.

    That of a tied head, whose w is a transposed table, so becomes the table's without a copy. Of
    two-byte numbers it is float32, but CuPy has no product that gives it: sums are in float32, and
    rounded once to the two bytes.
    """
    dw = x.T.dot(dy) if w.flags.c_contiguous else dy.T.dot(x).T
    return array_namespace(dw).astype(dw, working_dtype(dw), copy=False)


def added(total: Array | None, part: Array) -> Array:
    """total + part, in place where there is a total."""
    if total is None:
        return part
    total += part
    return total
