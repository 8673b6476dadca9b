"""A stand-in for CUDA: the kernels of backends/cupy, launched by their own Python, on the CPU.

`build.load` compiles a .cu file with g++ and `shim.h`; `array.Array` takes CuPy's place. To the
dispatch this folder is the backend of the library "cuda_shim", whose kernels are those of CuPy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuda_shim.array import DEVICE, Array, Fault, namespace
from cuda_shim.build import COMPILER, missing_compiler
from cuda_shim.cublaslt import CublasLt
from cuda_shim.cudnn import Cudnn
from cuda_shim.graph import Graph, refuse
from cuda_shim.launcher import launch
from cuda_shim.on_request import calling, calling_cudnn
from xformer import dispatch
from xformer.backends.cupy import deterministic
from xformer.backends.cupy.compiled import Compiled
from xformer.backends.cupy.module import DRIVERS  # registers the kernels; imports no CuPy
from xformer.backends.cupy.packed import packed
from xformer.dispatch.backend import Backend, Unusable
from xformer.dispatch.shapes import STORED

__all__ = [
    "COMPILER",
    "DEVICE",
    "Array",
    "CublasLt",
    "Cudnn",
    "Fault",
    "ShimBackend",
    "backend",
    "calling",
    "calling_cudnn",
]

NAME = __name__


@dataclass(frozen=True)
class ShimBackend(Backend):
    """Arrays that only kernels and the namespace can reach."""

    graphs = True
    precisions = STORED

    def to_numpy(self, array: Any) -> np.ndarray:
        """The values of an array as a NumPy array on the host."""
        refuse("a value is looked at")
        return np.array(array.host)

    def deterministic(self) -> AbstractContextManager[None]:
        """That of CuPy's kernels."""
        return deterministic()

    def compiled(
        self, fn: Callable[..., Any], donated: Sequence[int], *, lends: bool = False
    ) -> Callable[..., Any]:
        """As on CuPy, by the stand-in's graphs."""
        return Compiled(fn, donated, self, lends=lends)

    def _stored_as(self, params: Any, dtype: Any) -> Any:
        return packed(params, dtype)

    def _from_host(self, host: np.ndarray) -> Array:
        refuse("a value is brought from the host")
        return Array(np.array(host, order="C"))


def backend(device: str | None = None) -> Backend:
    """The stand-in; its only device is "cuda:0"."""
    if device not in (None, DEVICE):
        raise ValueError(f"backend {NAME} has one device, {DEVICE}, got {device!r}")
    if why := missing_compiler():
        raise Unusable(f"the CUDA stand-in cannot be used: {why}")
    return ShimBackend(NAME, namespace, DEVICE, ("float32", "float64"), np.__version__)


DRIVERS[Array] = SimpleNamespace(
    launch=launch,
    empty=namespace.empty,
    Graph=Graph,
    CUBLASLT=calling.runtime,
    CUDNN=calling_cudnn.runtime,
)
sys.modules[f"xformer.backends.{NAME}"] = sys.modules[NAME]  # where the dispatch looks for it
for op in dispatch.ops():
    if "cupy" in op.kernels:
        op.kernels[NAME] = op.kernels["cupy"]  # the list itself: later kernels too
