"""NumPy arrays whose linear maps are products by Intel's MKL (extra `mkl`), where asked for.

    backend = xformer.backends.get("mkl")

From then on in the whole process, and the kernels of `xformer.backends.numba` with them, of which
those of whole layers have products of their own.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

from xformer.backends import numba, numpy
from xformer.backends.base import Backend
from xformer.backends.mkl.gemm import multiply, run_on_one_thread
from xformer.backends.numpy import products

__all__ = ["backend", "register"]


def register() -> None:
    """Run them from now on. Unusable where MKL already has threads of its own."""
    run_on_one_thread()
    numba.register()
    products.multiply = multiply


def backend(device: str | None = None) -> Backend:
    """NumPy's backend under another name."""
    return replace(numpy.backend(device), name="mkl", version=version("mkl"))
