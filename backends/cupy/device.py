"""CuPy's devices, as a backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import array_api_compat.cupy as xp
import cupy
import numpy as np

from xformer.backends.cupy import driver
from xformer.backends.cupy.compiled import Compiled
from xformer.backends.cupy.index_add import deterministic
from xformer.backends.cupy.packed import packed
from xformer.base.printing import size
from xformer.base.typing import Array
from xformer.dispatch.backend import INSTALL_CUDA, Backend, Memory, Unusable
from xformer.dispatch.shapes import STORED

OLDEST = (14, 2)  # the oldest CuPy; the extras cuda12 and cuda13 require the same
CAPABILITY = 80  # 8.0: its blocks have the shared memory that sdpa needs


@dataclass(frozen=True)
class CupyBackend(Backend):
    """Arrays on one CUDA device."""

    graphs = True
    defers = True
    precisions = STORED

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return a copy of an array on the host, as a NumPy array."""
        host: np.ndarray = cupy.asnumpy(array)
        return host

    def synchronize(self) -> None:
        """Wait for the device."""
        self.device.synchronize()

    def memory(self) -> Memory:
        """Return the bytes in use, and the bytes that the device's memory pools hold."""
        with self.device:
            pools = driver.pools()
            used, total = (p.used_bytes() for p in pools), (p.total_bytes() for p in pools)
            return Memory(sum(used), sum(total))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which the device is CuPy's current one.

        Raises MemoryError instead of CuPy's OutOfMemoryError, with the device's memory and advice.
        """
        try:
            with self.device:
                yield
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(self._too_little(error)) from error

    def deterministic(self) -> AbstractContextManager[None]:
        """Return a context that sums over repeated ids in a fixed order.

        All other kernels are repeatable without it.
        """
        return deterministic()

    def compiled(
        self, fn: Callable[..., Any], donated: Sequence[int], *, lends: bool = False
    ) -> Callable[..., Any]:
        """Return `fn` as a CUDA graph; the arguments are described in `Backend.compiled`."""
        return Compiled(fn, donated, self, lends=lends)

    def _stored_as(self, params: Any, dtype: Any) -> Any:
        with self.active():
            return packed(params, dtype)

    def _too_little(self, error: MemoryError) -> str:
        with self.device:
            free, total = cupy.cuda.runtime.memGetInfo()
            pieces = cupy.get_default_memory_pool().free_bytes()
        return (
            f"backend cupy: {error} Of the {size(total)} of {self.device_name()} "
            f"(cuda:{self.device.id}) {size(free)} are free, and {size(pieces)} in pieces that are "
            "too small; smaller batches, or activation_checkpointing=True of the model, need less"
        )

    def _from_host(self, host: np.ndarray) -> Array:
        with self.active():
            return cupy.asarray(host)

    def device_name(self) -> str:
        """Return the name of the device."""
        name: bytes = cupy.cuda.runtime.getDeviceProperties(self.device.id)["name"]
        return name.decode()


def opened(device: str | None) -> Backend:
    """Return the backend on a device.

    device: "cuda" or "cuda:N"; None: the current device
    Raises Unusable if CuPy or the device cannot be used, ValueError if there is no such device.
    """
    _require_version(cupy.__version__)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        reason = _reason_no_device(error)
        raise Unusable(f"backend cupy cannot be used: {reason} ({error})") from None
    if count == 0:
        raise Unusable("backend cupy cannot be used: no CUDA device is visible")
    backend = CupyBackend(
        "cupy", xp, _device(device, count), ("float32", "float64"), cupy.__version__
    )
    _require_capability(backend)
    return backend


def _require_version(version: str) -> None:
    """Raise Unusable if CuPy is too old."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Unusable(
            f"backend cupy cannot be used: it needs CuPy {oldest} or newer, this is {version}. "
            f"Install it with {INSTALL_CUDA}"
        )


def _require_capability(backend: CupyBackend) -> None:
    """Raise Unusable if the device's compute capability is below `CAPABILITY`."""
    capability = int(backend.device.compute_capability)  # CuPy caches it
    if capability < CAPABILITY:
        raise Unusable(
            f"backend cupy cannot be used: its kernels need compute capability {CAPABILITY / 10} "
            f"or higher, {backend.device_name()} (cuda:{backend.device.id}) has {capability / 10}"
        )


def _reason_no_device(error: Exception) -> str:
    """Return the reason why CUDA finds no device.

    error: what CUDA raised when it was asked for the number of devices
    """
    if "InsufficientDriver" in str(error):  # the error without a driver, too
        return "there is no NVIDIA driver, or it is too old for CuPy's CUDA"
    return "no CUDA device is visible"


def _device(name: str | None, count: int) -> cupy.cuda.Device:
    if name in (None, "cuda"):
        return cupy.cuda.Device()
    prefix, _, number = str(name).partition(":")
    if prefix != "cuda" or not number.isdigit() or int(number) >= count:
        raise ValueError(f"backend cupy has devices cuda:0 to cuda:{count - 1}, got {name!r}")
    return cupy.cuda.Device(int(number))
