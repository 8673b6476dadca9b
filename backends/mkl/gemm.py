"""One matrix product by MKL, on the thread that asks for it."""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, files
from typing import Any

import numpy as np

from xformer.backends.base import Unusable
from xformer.backends.numpy.products import AS_IT_IS, SMALL, TRANSPOSED, by_numpy, layout
from xformer.backends.numpy.threads import n_threads
from xformer.typing import Array

ROW_MAJOR, COLUMN_MAJOR = 101, 102  # of CBLAS
SEQUENTIAL = 1  # of MKL's threading layers: `threads.blocks` has threads of its own


def multiply(x: Array, w: Array, out: Array, *, add: bool = False) -> None:
    """out = x w, or out += x w; by NumPy where it is small, or not of matrices that BLAS can read.

    x: (N, I)   w: (I, O)   out: (N, O), float32 or float64.
    """
    gemm = GEMM.get(out.dtype.char)
    same = gemm is not None and x.dtype == w.dtype == out.dtype
    layouts = [layout(a) for a in (x, w, out)] if same and len(x) * w.size > SMALL else [None]
    if gemm is None or None in layouts:
        by_numpy(x, w, out, add=add)
        return
    (x_order, x_step), (w_order, w_step), (order, step) = layouts  # type: ignore[misc]
    whole = ROW_MAJOR
    if order == TRANSPOSED:  # then every row of memory is a column
        whole = COLUMN_MAJOR
        x_order, w_order = (AS_IT_IS + TRANSPOSED - o for o in (x_order, w_order))
    gemm(
        *(whole, x_order, w_order, *out.shape, x.shape[1]),
        *(1.0, x.ctypes.data, x_step, w.ctypes.data, w_step),
        *(float(add), out.ctypes.data, step),
    )


def _library() -> ctypes.CDLL:
    """MKL's, where pip has put it."""
    n_threads()  # which looks once for NumPy's BLAS: this is not it
    try:
        listed = files("mkl") or ()
    except PackageNotFoundError:
        raise ImportError("the package mkl is not installed") from None
    found = [path for path in listed if "mkl_rt" in path.name]
    if not found:
        raise ImportError("the package mkl lists no mkl_rt among its files")
    try:
        return ctypes.CDLL(str(found[0].locate()))
    except OSError as error:
        raise ImportError(f"MKL cannot be loaded: {error}") from error


def run_on_one_thread() -> None:
    """MKL has no threads of its own from now on. Unusable where it already has."""
    if _MKL.MKL_Set_Threading_Layer(SEQUENTIAL) != SEQUENTIAL:
        raise Unusable(
            "backend mkl cannot be used: MKL already runs on threads of its own in this process"
        )


def _gemm(name: str, real: type) -> Any:
    """A function of CBLAS; while it runs, other threads have the GIL."""
    whole, at = ctypes.c_int, ctypes.c_void_p
    function = getattr(_MKL, name)
    function.restype = None
    function.argtypes = [*(whole,) * 6, real, at, whole, at, whole, real, at, whole]
    return function


_MKL = _library()
GEMM = {
    np.dtype("float32").char: _gemm("cblas_sgemm", ctypes.c_float),
    np.dtype("float64").char: _gemm("cblas_dgemm", ctypes.c_double),
}
