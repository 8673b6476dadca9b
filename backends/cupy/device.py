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

from xformer.backends.base import Backend, Memory, Unusable
from xformer.backends.cupy import driver
from xformer.backends.cupy.compiled import Compiled
from xformer.backends.cupy.index_add import deterministic
from xformer.backends.cupy.packed import packed
from xformer.shapes import STORED
from xformer.typing import Array

OLDEST = (14, 2)  # as the extras cuda12 and cuda13 ask for
CAPABILITY = 80  # 8.0, whose blocks have the shared memory that sdpa asks for


@dataclass(frozen=True)
class CupyBackend(Backend):
    """Arrays on one CUDA device."""

    graphs = True
    defers = True
    precisions = STORED

    def to_numpy(self, array: Array) -> np.ndarray:
        """The values of an array as a NumPy array on the host."""
        host: np.ndarray = cupy.asnumpy(array)
        return host

    def synchronize(self) -> None:
        """Wait for the device."""
        self.device.synchronize()

    def memory(self) -> Memory:
        """Bytes in use, and the size that the pools of the device's memory have grown to."""
        with self.device:
            pools = driver.pools()
            used, total = (p.used_bytes() for p in pools), (p.total_bytes() for p in pools)
            return Memory(sum(used), sum(total))

    @contextmanager
    def active(self) -> Iterator[None]:
        """The device is CuPy's current one; what CuPy says of too little memory is said in full."""
        try:
            with self.device:
                yield
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(self._too_little(error)) from error

    def deterministic(self) -> AbstractContextManager[None]:
        """Sums over repeated ids in a fixed order; all else is repeatable as it is."""
        return deterministic()

    def compiled(
        self, fn: Callable[..., Any], donated: Sequence[int], *, lends: bool = False
    ) -> Callable[..., Any]:
        """A CUDA graph."""
        return Compiled(fn, donated, self, lends=lends)

    def _stored_as(self, params: Any, dtype: Any) -> Any:
        with self.active():
            return packed(params, dtype)

    def _too_little(self, error: MemoryError) -> str:
        with self.device:
            free, total = cupy.cuda.runtime.memGetInfo()
            pieces = cupy.get_default_memory_pool().free_bytes()
        return (
            f"backend cupy: {error} Of the {total / 1e9:,.2f} GB of {self.device_name()} "
            f"(cuda:{self.device.id}) {free / 1e9:,.2f} GB are free, and {pieces / 1e9:,.2f} GB in "
            "pieces that are too small; smaller batches, or activation_checkpointing=True of the "
            "model, need less"
        )

    def _from_host(self, host: np.ndarray) -> Array:
        with self.active():
            return cupy.asarray(host)

    def device_name(self) -> str:
        """What the device is called."""
        name: bytes = cupy.cuda.runtime.getDeviceProperties(self.device.id)["name"]
        return name.decode()


def opened(device: str | None) -> Backend:
    """The backend on "cuda" or "cuda:N", on the current device unless given."""
    _require_version(cupy.__version__)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise Unusable(f"backend cupy cannot be used: {_why(error)} ({error})") from None
    if count == 0:
        raise Unusable("backend cupy cannot be used: no CUDA device is visible")
    found = CupyBackend(
        "cupy", xp, _device(device, count), ("float32", "float64"), cupy.__version__
    )
    _require_capability(found)
    return found


def _require_version(version: str) -> None:
    """Unusable for a CuPy that is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Unusable(
            f"backend cupy cannot be used: it needs CuPy {oldest} or newer, this is {version}. "
            "Install it with pip install --upgrade 'xformer-array[cuda13]' (or [cuda12])"
        )


def _require_capability(found: CupyBackend) -> None:
    """Unusable for a device whose blocks have too little shared memory."""
    capability = int(found.device.compute_capability)  # which CuPy keeps
    if capability < CAPABILITY:
        raise Unusable(
            f"backend cupy cannot be used: its kernels need compute capability {CAPABILITY / 10} "
            f"or higher, {found.device_name()} (cuda:{found.device.id}) has {capability / 10}"
        )


def _why(error: Exception) -> str:
    """What an error means that CUDA gives in the place of the number of devices."""
    if "InsufficientDriver" in str(error):  # what it says without a driver too
        return "there is no NVIDIA driver, or it is too old for CuPy's CUDA"
    return "no CUDA device is visible"


def _device(name: str | None, count: int) -> cupy.cuda.Device:
    if name in (None, "cuda"):
        return cupy.cuda.Device()
    prefix, _, number = str(name).partition(":")
    if prefix != "cuda" or not number.isdigit() or int(number) >= count:
        raise ValueError(f"backend cupy has devices cuda:0 to cuda:{count - 1}, got {name!r}")
    return cupy.cuda.Device(int(number))
