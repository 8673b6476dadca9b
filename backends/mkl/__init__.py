"""NumPy arrays whose linear maps are products by Intel's MKL (extra `mkl`).

    with xformer.kernels("mkl"): ...

The other kernels are those of `xformer.backends.numba`; some of them have products of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import version

from xformer.backends import numba, numpy  # noqa: F401 - numba's kernels go with it
from xformer.backends.base import Backend
from xformer.backends.mkl.gemm import multiply, run_on_one_thread
from xformer.backends.numpy.products import MULTIPLY

__all__ = ["backend", "run_on_one_thread"]

MULTIPLY["mkl"] = multiply


def backend(device: str | None = None) -> Backend:
    """NumPy's backend under another name."""
    return replace(numpy.backend(device), name="mkl", version=_version())


@cache
def _version() -> str:
    """Of the package: looking for it takes a millisecond."""
    return version("mkl")
