"""Products of matrices within compiled loops, by the BLAS library that NumPy calls itself."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numpy.threads import libraries

NAMES = ("scipy_cblas_sgemm64_", "cblas_sgemm64_", "scipy_cblas_sgemm", "cblas_sgemm")
ROW_MAJOR, AS_IT_IS, TRANSPOSED = map(np.int32, (101, 111, 112))  # of CBLAS


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


@rowwise
def add_product(gemm: Any, scale: Any, a: Any, b: Any, keep: Any, out: Any) -> None:
    """out = scale a b + keep out, in float32.

    gemm: `sgemm()`. a: (N, K)   b: (K, M)   out: (N, M), of contiguous rows; a and b of such, or of
    such columns. Sizes go as 64 bits, of which a library of 32 reads the lower half.
    """
    a_order, a_step = _layout(a)
    b_order, b_step = _layout(b)
    n, m, k = out.shape[0], out.shape[1], a.shape[1]
    x, w, y, y_step = a.ctypes.data, b.ctypes.data, out.ctypes.data, out.strides[0] // 4
    left, right = np.float32(scale), np.float32(keep)
    call(gemm, (ROW_MAJOR, a_order, b_order, n, m, k, left, x, a_step, w, b_step, right, y, y_step))


@rowwise
def _layout(x: Any) -> Any:
    """Its order for CBLAS, and from one row or column to the next."""
    down, across = x.strides
    rows = across == 4 and down >= 4 * x.shape[1]
    return (AS_IT_IS, down // 4) if rows else (TRANSPOSED, across // 4)
