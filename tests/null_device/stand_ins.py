"""NVIDIA's libraries over the null device: calls are counted by `device.call_library`.

cuBLAS refuses calls within a capture, as CuPy does. cuBLASLt's and cuDNN's are those of the CUDA
stand-in (`cuda_shim`), without its arithmetic: plans, descriptors and workspaces are made and
checked as ever.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cuda_shim
import cupy_backends.cuda.libs
from cuda_shim import cudnn_graph

from null_device.device import call_library, cupy
from xformer.backends.cupy import cublaslt, cudnn
from xformer.backends.cupy.runtimes import Runtime

COMPUTE = {"CUBLAS_COMPUTE_32F": 68, "CUBLAS_COMPUTE_32F_FAST_TF32": 77}


class Cublas(types.ModuleType):
    """cupy_backends.cuda.libs.cublas, which needs the library to be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("CUBLAS"):
            return COMPUTE.get(name, 1)
        if name in ("create", "destroy"):
            return lambda *handle: 1

        def call(*args: Any) -> None:
            if cupy.cuda.get_current_stream().is_capturing():
                raise NotImplementedError(f"cuBLAS ({name}) is called during a capture")
            if not name.startswith(("set", "get")):
                call_library("cublas")

        return call


class CublasLt(cuda_shim.CublasLt):
    workspace = 512  # a large one would hide what else a small step needs

    def matmul(self, *args: Any) -> None:
        call_library("cublaslt")


class Cudnn(cuda_shim.Cudnn):
    def pygraph(self, **options: Any) -> Any:
        return Graph(self, **options)


class Graph(cudnn_graph.Graph):
    def execute(self, *args: Any, **kwargs: Any) -> None:
        call_library("cudnn")


def _sorted(name: str) -> Any:
    def call(*args: Any) -> None:
        call_library(f"thrust.{name}")

    return call


NAME = "cupy_backends.cuda.libs.cublas"
sys.modules[NAME] = cupy_backends.cuda.libs.cublas = Cublas(NAME)
for _name in ("argsort", "lexsort", "sort"):
    setattr(cupy.cuda.thrust, _name, _sorted(_name))


@contextmanager
def using(*names: str) -> Iterator[None]:
    """Within it cublaslt, cudnn are installed where they are named."""
    from xformer.backends.cupy import driver  # which imports CuPy: behind the null device

    lt, nn = CublasLt(), Cudnn()
    none = "the null device is without it"
    before = driver.CUBLASLT, driver.CUDNN
    states = cublaslt._state, cudnn._state
    cublaslt._state, cudnn._state = cublaslt.State(), cudnn.State()
    driver.CUBLASLT = Runtime(
        lambda: lt if "cublaslt" in names else none, driver.stream_of, driver.allocate
    )
    driver.CUDNN = Runtime(
        lambda: nn if "cudnn" in names else none, driver.attention_stream_of, driver.allocate
    )
    try:
        yield
    finally:
        driver.CUBLASLT, driver.CUDNN = before
        cublaslt._state, cudnn._state = states
