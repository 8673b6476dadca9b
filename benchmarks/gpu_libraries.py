"""With what `benchmarks.gpu` measures: versions, NVIDIA's libraries, and the kernels chosen."""

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


def versions(place: Backend) -> dict[str, str]:
    """Of the packages, of CUDA, of the libraries that kernels call, and of the driver."""
    found = {place.name: place.version}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if place.name == "cupy":
        number = sys.modules["cupy"].cuda.runtime.runtimeGetVersion()
        found["CUDA"] = f"{number // 1000}.{number % 1000 // 10}"
    found |= {name: own for name, own in backends.beside("cupy").items() if own.isdigit()}
    driver = machine.nvidia_smi("driver_version")
    return found if driver is None else found | {"driver": driver}


def libraries(place: Backend) -> dict[str, Any]:
    """What runs linear maps and attention here, and why other kernels do not.

    "beside": of NVIDIA's libraries the version, or why it cannot be called. "runs": of an op and a
    dtype the implementation; "not": of it the others, each with its reason.
    """
    rng = place.generator(0)
    x, w, b = (rng.normal(shape) for shape in ((64, 64), (64, 64), (64,)))
    heads = [rng.normal((1, 2, 64, 64)) for _ in range(3)]
    found: dict[str, Any] = {"beside": backends.beside("cupy"), "runs": {}, "not": {}}
    for dtype in STORED:
        precision = None if dtype == "float32" else dtype
        *qkv, a, m, v = place.cast_params([*heads, x, w, b], precision)
        calls: list[tuple[Any, Any, dict[str, Any]]] = [(ops.linear, (a, m, v), {})]
        calls.append((ops.sdpa, qkv, {"causal": True}))
        for op, args, options in calls:
            first, *rest = explain(op, *args, **options).splitlines()
            name = f"{op.__name__}, {dtype}"
            found["runs"][name] = first.partition(": ")[2].removeprefix("xformer.backends.")
            why = [line.removeprefix("- xformer.backends.") for line in rest]
            found["not"][name] = [line for line in why if ": not asked, " not in line]
    return found
