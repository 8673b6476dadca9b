"""What tests of CUDA's kernels do alike on the stand-in and, with `--backend cupy`, on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cuda_shim
import numpy as np
from libraries import STAND_IN

from xformer.backends import Backend

# A GPU adds in another order, its tensor cores cut sums off where the CPU rounds them, and its exp
# and tanh have other last digits: so many times the error that float32 has on the CPU.
SLACK = {STAND_IN: 1, "cupy": 4}


def is_stand_in(library: Backend) -> bool:
    """Whether blocks run on the CPU, with every access watched."""
    return library.name == STAND_IN


def array_type(library: Backend) -> type:
    """Of its arrays, by which kernels find their launcher and NVIDIA's libraries."""
    return type(library.asarray([1.0]))


def placed(library: Backend, host: np.ndarray) -> Any:
    """host on the device, with its strides, as far behind a multiple of 256 bytes as on the host.

    The stand-in's array is that memory itself.
    """
    if is_stand_in(library):
        return cuda_shim.Array(host)
    import cupy

    low, high = np.lib.array_utils.byte_bounds(host)
    at = low % 256  # CuPy's memory begins at multiples of 512
    held = cupy.empty(at + high - low, np.uint8)
    between = ctypes.string_at(low, high - low)  # what lies between the elements too
    held[at:] = cupy.asarray(np.frombuffer(between, np.uint8))
    first = held.data + (at + host.ctypes.data - low)
    return cupy.ndarray(host.shape, host.dtype, first, host.strides)


def repeated(
    library: Backend, run: Callable[[], list[Any]], *, in_any_order: bool = False
) -> list[Any]:
    """The arrays that `run` makes; on a GPU it makes them twice, of the same bits.

    in_any_order: sums are made by atomic additions, so that they may differ. Those of the stand-in
    run in another order each time in test_deterministic.py.
    """
    first = run()
    if is_stand_in(library) or in_any_order:
        return first
    for i, (one, other) in enumerate(zip(first, run(), strict=True)):
        same = bits(library, one) == bits(library, other)
        assert same, f"{'y' if i == 0 else f'gradient {i}'}: other bits in the second run"
    return first


def bits(library: Backend, leaf: Any) -> Any:
    """The bytes of an array; what is none as it is written."""
    if not hasattr(leaf, "dtype"):
        return repr(leaf)
    return np.asarray(leaf if isinstance(leaf, np.ndarray) else library.to_numpy(leaf)).tobytes()


@contextmanager
def unwritten() -> Iterator[None]:
    """What CuPy allocates holds NaN, or -1, until it is written to, as it does on the stand-in."""
    import cupy

    def malloc(size: int) -> Any:
        memory = cupy.get_default_memory_pool().malloc(size)
        if size:
            memory.memset_async(0xFF, size)
        return memory

    with cupy.cuda.using_allocator(malloc):
        yield
