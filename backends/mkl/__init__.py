"""Linear maps of NumPy arrays with the matrix products of Intel's MKL (extra `mkl`).

    with xformer.kernels("mkl"): ...

All other kernels are those of `xformer.backends.numba`. Some of them compute products without MKL.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import version

from xformer.backends import numba, numpy  # noqa: F401 - registers numba's kernels
from xformer.backends.mkl.gemm import multiply, run_on_one_thread
from xformer.backends.numpy.products import MULTIPLY
from xformer.dispatch.backend import Backend

__all__ = ["backend", "run_on_one_thread"]

MULTIPLY["mkl"] = multiply


def backend(device: str | None = None) -> Backend:
    """Return the NumPy backend with the name "mkl", which chooses its kernels."""
    return replace(numpy.backend(device), name="mkl", version=_version())


@cache
def _version() -> str:
    """Return the version of the package mkl. To find it takes a millisecond."""
    return version("mkl")
