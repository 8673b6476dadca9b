"""CuPy's devices, as a backend."""

from __future__ import annotations

from dataclasses import dataclass

import array_api_compat.cupy as xp
import cupy
import numpy as np
from xformer.backends.base import Backend, Memory, Unusable

from xformer.typing import Array


@dataclass(frozen=True)
class CupyBackend(Backend):
    """Arrays on one CUDA device."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """The values of an array as a NumPy array on the host."""
        host: np.ndarray = cupy.asnumpy(array)
        return host

    def synchronize(self) -> None:
        """Wait for the device."""
        self.device.synchronize()

    def memory(self) -> Memory:
        """Bytes in use, and the size that the device's memory pool has grown to."""
        with self.device:
            pool = cupy.get_default_memory_pool()
            return Memory(pool.used_bytes(), pool.total_bytes())

    def _from_host(self, host: np.ndarray) -> Array:
        with self.device:
            return cupy.asarray(host)

    def device_name(self) -> str:
        """What the device is called."""
        name: bytes = cupy.cuda.runtime.getDeviceProperties(self.device.id)["name"]
        return name.decode()


def opened(device: str | None) -> Backend:
    """The backend on "cuda" or "cuda:N", on the current device unless given."""
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise Unusable(
            f"backend cupy cannot be used: no CUDA device is visible ({error})"
        ) from None
    if count == 0:
        raise Unusable("backend cupy cannot be used: no CUDA device is visible")
    return CupyBackend("cupy", xp, _device(device, count), ("float32", "float64"), cupy.__version__)


def _device(name: str | None, count: int) -> cupy.cuda.Device:
    if name in (None, "cuda"):
        return cupy.cuda.Device()
    prefix, _, number = str(name).partition(":")
    if prefix != "cuda" or not number.isdigit() or int(number) >= count:
        raise ValueError(f"backend cupy has devices cuda:0 to cuda:{count - 1}, got {name!r}")
    return cupy.cuda.Device(int(number))
