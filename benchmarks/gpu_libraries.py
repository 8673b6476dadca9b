"""A section of `benchmarks.gpu`: versions, NVIDIA's libraries, and the kernels chosen."""

from __future__ import annotations

import importlib.metadata
import sys
from contextlib import suppress
from typing import Any

from benchmarks import machine
from xformer import backends, explain, ops
from xformer.backends import Backend

PACKAGES = (
    *("torch", "triton", "jax", "jaxlib", "ml_dtypes", "nvmath-python", "nvidia-cudnn-frontend"),
    *("cuda-bindings", "cuda-core", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)
STORED = ("float32", "bfloat16")


def versions(backend: Backend) -> dict[str, str]:
    """Return the versions of packages, CUDA, the libraries that kernels call, and the driver."""
    by_name = {backend.name: backend.version}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    if backend.name == "cupy":
        number = sys.modules["cupy"].cuda.runtime.runtimeGetVersion()
        by_name["CUDA"] = f"{number // 1000}.{number % 1000 // 10}"
    by_name |= {
        name: version for name, version in backends.beside("cupy").items() if version.isdigit()
    }
    driver = machine.nvidia_smi("driver_version")
    return by_name if driver is None else by_name | {"driver": driver}


def libraries(backend: Backend) -> dict[str, Any]:
    """Return which kernels run linear maps and attention here, and why other kernels do not.

    - "beside": for each of NVIDIA's libraries its version, or why it cannot be called
    - "runs": for each op and dtype the chosen implementation
    - "not": for each op and dtype the other implementations, each with its reason
    """
    rng = backend.generator(0)
    x, w, b = (rng.normal(shape) for shape in ((64, 64), (64, 64), (64,)))
    heads = [rng.normal((1, 2, 64, 64)) for _ in range(3)]
    result: dict[str, Any] = {"beside": backends.beside("cupy"), "runs": {}, "not": {}}
    for dtype in STORED:
        precision = None if dtype == "float32" else dtype
        *qkv, a, m, v = backend.cast_params([*heads, x, w, b], precision)
        calls: list[tuple[Any, Any, dict[str, Any]]] = [(ops.linear, (a, m, v), {})]
        calls.append((ops.sdpa, qkv, {"causal": True}))
        for op, args, options in calls:
            first, *refusals = explain(op, *args, **options).splitlines()
            name = f"{op.__name__}, {dtype}"
            result["runs"][name] = first.partition(": ")[2].removeprefix("xformer.backends.")
            lines = [line.removeprefix("- xformer.backends.") for line in refusals]
            result["not"][name] = [line for line in lines if ": not asked, " not in line]
    return result
