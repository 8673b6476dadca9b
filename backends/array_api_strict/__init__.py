"""array-api-strict: NumPy behind the letter of the standard, to find code that leaves it."""

from __future__ import annotations

from dataclasses import dataclass

import array_api_strict
import numpy as np

from xformer.backends.base import Backend
from xformer.typing import Array


@dataclass(frozen=True)
class StrictBackend(Backend):
    """Its arrays leave their device only on request."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """The values of an array as a NumPy array on the host."""
        return np.asarray(array.to_device(array_api_strict.Device("CPU_DEVICE")))


def backend(device: str | None = None) -> Backend:
    """The array-api-strict backend; devices "CPU_DEVICE", "device1", "device2"."""
    names = ("CPU_DEVICE", "device1", "device2")
    if device is not None and device not in names:
        raise ValueError(f"backend array-api-strict has devices {', '.join(names)}, got {device!r}")
    where = None if device is None else array_api_strict.Device(device)
    dtypes = ("float32", "float64")
    return StrictBackend(
        "array-api-strict", array_api_strict, where, dtypes, array_api_strict.__version__
    )
