"""A matrix product by MKL on the calling thread."""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, files
from typing import Any

import numpy as np

from xformer.backends.numpy.products import AS_IT_IS, SMALL, TRANSPOSED, by_numpy, layout
from xformer.backends.numpy.threads import n_threads
from xformer.base.typing import Array
from xformer.dispatch.backend import Unusable

ROW_MAJOR, COLUMN_MAJOR = 101, 102  # CblasRowMajor, CblasColMajor
SEQUENTIAL = 1  # MKL_THREADING_SEQUENTIAL: kernels run on the thread pool of `numpy.threads`


def multiply(x: Array, w: Array, out: Array, *, add: bool = False) -> None:
    """Compute out[...] = x w, or out += x w if `add`.

    x: (N, I)   w: (I, O)   out: (N, O)

    NumPy computes small products, other dtypes than float32 and float64, and matrices in which
    neither rows nor columns are contiguous.
    """
    gemm = GEMM.get(out.dtype.char)
    same_dtype = gemm is not None and x.dtype == w.dtype == out.dtype
    is_large = len(x) * w.size > SMALL
    layouts = [layout(a) for a in (x, w, out)] if same_dtype and is_large else [None]
    if gemm is None or None in layouts:
        by_numpy(x, w, out, add=add)
        return
    (x_order, x_stride), (w_order, w_stride), (order, stride) = layouts  # type: ignore[misc]
    cblas_order = ROW_MAJOR
    if order == TRANSPOSED:  # out is column-major, so x and w are described as column-major too
        cblas_order = COLUMN_MAJOR
        x_order, w_order = (AS_IT_IS + TRANSPOSED - o for o in (x_order, w_order))
    gemm(
        *(cblas_order, x_order, w_order, *out.shape, x.shape[1]),
        *(1.0, x.ctypes.data, x_stride, w.ctypes.data, w_stride),
        *(float(add), out.ctypes.data, stride),
    )


def _library() -> ctypes.CDLL:
    """Load MKL from the installed package mkl. Raise ImportError if that fails."""
    n_threads()  # it looks for NumPy's BLAS once, and must not find MKL
    try:
        paths = files("mkl") or ()
    except PackageNotFoundError:
        raise ImportError("the package mkl is not installed") from None
    libraries = [path for path in paths if "mkl_rt" in path.name]
    if not libraries:
        raise ImportError("the package mkl lists no mkl_rt among its files")
    try:
        return ctypes.CDLL(str(libraries[0].locate()))
    except OSError as error:
        raise ImportError(f"MKL cannot be loaded: {error}") from error


def run_on_one_thread() -> None:
    """Make MKL compute on the calling thread only. Raise Unusable if it already uses threads."""
    if _MKL.MKL_Set_Threading_Layer(SEQUENTIAL) != SEQUENTIAL:
        raise Unusable(
            "backend mkl cannot be used: MKL already uses several threads in this process"
        )


def _gemm(name: str, real: type) -> Any:
    """Return the CBLAS function `name` for numbers of type `real`. It runs without the GIL."""
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    matrix = pointer, integer  # with its leading dimension
    function = getattr(_MKL, name)
    function.restype = None
    function.argtypes = [*(integer,) * 6, real, *matrix, *matrix, real, *matrix]
    return function


_MKL = _library()
GEMM = {
    np.dtype("float32").char: _gemm("cblas_sgemm", ctypes.c_float),
    np.dtype("float64").char: _gemm("cblas_dgemm", ctypes.c_double),
}
