"""Launching on CuPy's arrays: NVRTC compiles at the first launch, later ones look the kernel up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from xformer.backends.cupy.module import LAUNCHERS, Source, arithmetic

from xformer.typing import Array

FREELY = 48 << 10  # bytes of dynamic shared memory that a kernel has without asking

ARRAY = cupy.ndarray
_NULL = np.uint64(0)
_modules: dict[Any, Any] = {}
_kernels: dict[Any, Any] = {}


def launch(
    source: Source,
    name: str,
    like: Array,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    shared: int,
    macros: dict[str, Any],
) -> None:
    """`module.launch` on the device of `like` and CuPy's current stream there."""
    key = (source.name, name, like.dtype.char, *macros.values())
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = _compiled(source, name, like.dtype.name, macros)
    real = np.dtype(arithmetic(like.dtype.name)).type
    plain = tuple([_argument(arg, real) for arg in args])
    device = like.device
    if device.id == cupy.cuda.runtime.getDevice():
        _run(kernel, grid, block, plain, shared)
    else:
        with device:
            _run(kernel, grid, block, plain, shared)


def _run(kernel: Any, grid: Any, block: Any, args: tuple[Any, ...], shared: int) -> None:
    if shared > FREELY:
        kernel.max_dynamic_shared_size_bytes = shared
    kernel(grid, block, args, shared_mem=shared)


@contextmanager
def rounding_to_tf32() -> Iterator[None]:
    """What `products.tf32` asks of CuPy."""
    from cupy._core import _routines_linalg as linalg  # there is no other door to it

    before = linalg.get_compute_type(np.float32)
    linalg.set_compute_type(np.float32, linalg.COMPUTE_TYPE_TF32)
    try:
        yield
    finally:
        linalg.set_compute_type(np.float32, before)


def _argument(arg: Any, real: type) -> Any:
    if isinstance(arg, ARRAY):
        return arg
    if arg is None:
        return _NULL
    return real(arg) if isinstance(arg, float) else np.int64(arg)


def _compiled(source: Source, name: str, dtype: str, macros: dict[str, Any]) -> Any:
    key = (source.name, dtype, *macros.values())
    module = _modules.get(key)
    if module is None:
        options = source.options(dtype, macros)
        module = _modules[key] = cupy.RawModule(code=source.text, options=options)
    return module.get_function(name)


LAUNCHERS[ARRAY] = launch
