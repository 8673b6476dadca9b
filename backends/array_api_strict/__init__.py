"""array-api-strict: NumPy reduced to the array API standard, to find code that leaves it."""

from __future__ import annotations

from dataclasses import dataclass

import array_api_strict
import numpy as np

from xformer.base.typing import Array
from xformer.dispatch.backend import Backend


@dataclass(frozen=True)
class StrictBackend(Backend):
    """Arrays of array-api-strict. They are moved from their device only by `to_device`."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return `array` as a NumPy array on the host. It may share memory with `array`."""
        return np.asarray(array.to_device(array_api_strict.Device("CPU_DEVICE")))


def backend(device: str | None = None) -> Backend:
    """Return the array-api-strict backend. Its devices: "CPU_DEVICE", "device1", "device2"."""
    names = ("CPU_DEVICE", "device1", "device2")
    if device is not None and device not in names:
        raise ValueError(f"backend array-api-strict has devices {', '.join(names)}, got {device!r}")
    chosen = None if device is None else array_api_strict.Device(device)
    dtypes = ("float32", "float64")
    return StrictBackend(
        "array-api-strict", array_api_strict, chosen, dtypes, array_api_strict.__version__
    )
