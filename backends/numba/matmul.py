"""Matmuls in compiled loops: by `tile`, or by the BLAS library that NumPy calls."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from xformer.backends.numba.jit import rowwise
from xformer.backends.numba.tuning import SMALL
from xformer.backends.numpy import products as numpys
from xformer.backends.numpy.threads import libraries

NAMES = ("scipy_cblas_sgemm64_", "cblas_sgemm64_", "scipy_cblas_sgemm", "cblas_sgemm")
ROW_MAJOR, AS_IT_IS, TRANSPOSED = map(
    np.int32, (101, numpys.AS_IT_IS, numpys.TRANSPOSED)
)  # values of CBLAS enumerations


@functools.cache
def sgemm() -> int | None:
    """Return the address of the BLAS library's float32 matmul; None if it is not found."""
    for path in libraries():
        library = ctypes.CDLL(path)
        for name in NAMES:
            if hasattr(library, name):
                return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    return None


def _call(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the C function at `address`, which returns nothing. arguments: a tuple."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function_address, packed = values
        unpacked = [builder.extract_value(packed, i) for i in range(len(arguments))]
        function = ir.FunctionType(ir.VoidType(), [value.type for value in unpacked])
        builder.call(builder.inttoptr(function_address, function.as_pointer()), unpacked)
        return context.get_dummy_value()

    return types.void(address, arguments), build


call: Any = intrinsic(_call)


def matmul_unsupported() -> str | None:
    """Return why compiled loops cannot call BLAS; None if they can."""
    return None if sgemm() else "no matmul is found in NumPy's BLAS library"


@rowwise
def add_product(by: Any, scale: Any, a: Any, b: Any, keep: bool, out: Any) -> None:
    """Compute out = scale a b, or out += scale a b if `keep`, in float32.

    by: address of BLAS's sgemm, address of `tile.multiply` (0: none), float32 scratch of this
        thread for `tile.multiply`.
    a: (N, K)   b: (K, M)   out: (N, M). Rows of out are contiguous; rows or columns of a and b.
    Sizes are passed as 64 bits; a library with 32-bit integers reads the lower half.
    """
    a_order, a_step = _blas_layout(a)
    b_order, b_step = _blas_layout(b)
    (n, m), k, factor = out.shape, a.shape[1], np.float32(scale)
    x, w, y = a.ctypes.data, b.ctypes.data, out.ctypes.data
    y_step = 4 * m if n == 1 else out.strides[0]
    blas, tiles, scratch = by
    if tiles and (b_order == TRANSPOSED or n * m * k > SMALL):
        sizes = y, y_step, n, m, k
        x_steps, w_steps = _steps(a_order, a_step), _steps(b_order, b_step)
        factors = x, *x_steps, w, *w_steps
        call(tiles, (scratch.ctypes.data, factor, *factors, np.int64(keep), *sizes))
    else:
        orders, beta = (ROW_MAJOR, a_order, b_order), np.float32(1 if keep else 0)
        call(blas, (*orders, n, m, k, factor, x, a_step, w, b_step, beta, y, y_step // 4))


@rowwise
def _steps(order: int, step: int) -> Any:
    """Return the strides of a float32 matrix in bytes: (between rows, between columns).

    order, step: the two results of `_blas_layout` for the matrix
    """
    return (4 * step, 4) if order == AS_IT_IS else (4, 4 * step)


@rowwise
def _blas_layout(x: Any) -> Any:
    """Return (order, step): how CBLAS reads x (N, M), float32 with contiguous rows or columns.

    order: AS_IT_IS if the rows are contiguous, TRANSPOSED if the columns are
    step: the stride between rows, or between columns, in elements (the leading dimension)

    The stride of an axis of length 1 may be any number.
    """
    (n, m), (row_stride, column_stride) = x.shape, x.strides
    if (m == 1 or column_stride == 4) and (n == 1 or row_stride >= 4 * m):
        return AS_IT_IS, m if n == 1 else row_stride // 4
    return TRANSPOSED, n if m == 1 else column_stride // 4
