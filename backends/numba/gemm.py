"""Products of matrices in compiled loops: by `tile`, or by the BLAS library that NumPy calls."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.tuning import SMALL
from xformer.backends.numpy import products as numpys
from xformer.backends.numpy.threads import libraries

NAMES = ("scipy_cblas_sgemm64_", "cblas_sgemm64_", "scipy_cblas_sgemm", "cblas_sgemm")
ROW_MAJOR, AS_IT_IS, TRANSPOSED = map(
    np.int32, (101, numpys.AS_IT_IS, numpys.TRANSPOSED)
)  # of CBLAS


@functools.cache
def sgemm() -> int | None:
    """Where the library has its product of matrices in float32; None where none is known."""
    for path in libraries():
        library = ctypes.CDLL(path)
        for name in NAMES:
            if hasattr(library, name):
                return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    return None


def _call(typing: Any, address: Any, arguments: Any) -> Any:
    """Call what is at the address; the arguments are of their own types."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at, packed = values
        given = [builder.extract_value(packed, i) for i in range(len(arguments))]
        function = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        builder.call(builder.inttoptr(at, function.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(address, arguments), build


call: Any = intrinsic(_call)


def no_products() -> str | None:
    """Why there are none."""
    return None if sgemm() else "NumPy's BLAS has no product that can be called"


@rowwise
def add_product(by: Any, scale: Any, a: Any, b: Any, keep: bool, out: Any) -> None:
    """out = scale a b, or += that with keep, in float32.

    by: addresses of BLAS's sgemm and of `tile`'s product (0: none), and scratch of this thread.
    a: (N, K)   b: (K, M)   out: (N, M), of contiguous rows; a and b of contiguous rows or columns.
    Sizes are passed as 64 bits; a library of 32 reads the lower half.
    """
    a_order, a_step = _layout(a)
    b_order, b_step = _layout(b)
    (n, m), k, factor = out.shape, a.shape[1], np.float32(scale)
    x, w, y = a.ctypes.data, b.ctypes.data, out.ctypes.data
    y_step = 4 * m if n == 1 else out.strides[0]
    blas, tiles, memory = by
    if tiles and (b_order == TRANSPOSED or n * m * k > SMALL):
        sizes = y, y_step, n, m, k
        x_steps, w_steps = _steps(a_order, a_step), _steps(b_order, b_step)
        left, right = (x, *x_steps), (w, *w_steps)
        call(tiles, (memory.ctypes.data, factor, *left, *right, np.int64(keep), *sizes))
    else:
        orders, kept = (ROW_MAJOR, a_order, b_order), np.float32(1 if keep else 0)
        call(blas, (*orders, n, m, k, factor, x, a_step, w, b_step, kept, y, y_step // 4))


@rowwise
def _steps(order: int, step: int) -> Any:
    """Bytes from row to row, and from column to column."""
    return (4 * step, 4) if order == AS_IT_IS else (4, 4 * step)


@rowwise
def _layout(x: Any) -> Any:
    """Its order for CBLAS, and the step to the next row or column.

    The stride of an axis of length 1 may be any number.
    """
    (n, m), (down, across) = x.shape, x.strides
    if (m == 1 or across == 4) and (n == 1 or down >= 4 * m):
        return AS_IT_IS, m if n == 1 else down // 4
    return TRANSPOSED, n if m == 1 else across // 4
