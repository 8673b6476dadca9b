"""What every backend offers, whichever its library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xformer.typing import Array


class Unusable(ImportError):
    """A backend that is known but cannot be used here; the message says why and what to do."""


class Memory(NamedTuple):
    """Bytes of memory; None where the library or the system does not tell."""

    in_use: int | None
    peak: int | None


@dataclass(frozen=True)
class Backend:
    """An array library on one device: creation, transfer, synchronisation, memory.

    name: as in `xformer.backends.NAMES`   xp: its array API namespace   device: None for the
    default   dtypes: floating types it computes in   version: the library's.
    """

    name: str
    xp: Any
    device: Any
    dtypes: tuple[str, ...]
    version: str

    def asarray(self, values: Any, dtype: str | None = None) -> Array:
        """An array of this backend from host data (numbers, sequences, NumPy arrays).

        `dtype` is a name of the standard ("float32", "int64"); without it the values' own stays.
        Raises ValueError for a floating dtype the backend does not compute in.
        """
        host = np.asarray(values)
        if dtype is not None:
            host = host.astype(dtype)
        if np.issubdtype(host.dtype, np.floating) and host.dtype.name not in self.dtypes:
            raise ValueError(
                f"backend {self.name} computes in {' and '.join(self.dtypes)}, not {host.dtype}"
            )
        return self._from_host(host)

    def to_numpy(self, array: Array) -> np.ndarray:
        """The values of an array as a NumPy array on the host."""
        return np.asarray(array)

    def synchronize(self) -> None:
        """Wait until all work handed to the device is done (nothing to do on a CPU)."""

    def memory(self) -> Memory:
        """Bytes in use now and at most so far: of the process, or of the device's allocator."""
        return process_memory()

    def generator(self, seed: int, dtype: str = "float32") -> Generator:
        """Random numbers drawn on the host and transferred: the same on every backend."""
        return Generator(self, seed, dtype)

    def describe(self) -> str:
        """One line: library, version, device, floating types."""
        return f"{self.name} {self.version} on {self.device_name()}, {', '.join(self.dtypes)}"

    def _from_host(self, host: np.ndarray) -> Array:
        return self.xp.asarray(host, device=self.device)

    def device_name(self) -> str:
        """What the device is called."""
        return "cpu" if self.device is None else str(self.device)


class Generator:
    """Seeded draws on the host in float64, rounded to `dtype`, moved to a backend."""

    def __init__(self, backend: Backend, seed: int, dtype: str) -> None:
        self.backend, self.dtype = backend, dtype
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def normal(self, shape: Sequence[int], *, mean: float = 0.0, std: float = 1.0) -> Array:
        """Independent normal numbers of the given shape."""
        return self._move(self._rng.normal(mean, std, tuple(shape)))

    def uniform(self, shape: Sequence[int], *, low: float = 0.0, high: float = 1.0) -> Array:
        """Independent numbers uniform in [low, high)."""
        return self._move(self._rng.uniform(low, high, tuple(shape)))

    def integers(self, shape: Sequence[int], *, low: int = 0, high: int) -> Array:
        """Independent integers in [low, high), int64 (int32 where a library has no int64)."""
        return self.backend.asarray(self._rng.integers(low, high, tuple(shape)))

    def full(self, shape: Sequence[int], value: float) -> Array:
        """One value everywhere: no draw."""
        return self._move(np.full(tuple(shape), value))

    def _move(self, host: np.ndarray) -> Array:
        return self.backend.asarray(host, self.dtype)


def process_memory() -> Memory:
    """Resident bytes of this process, now and at most, where the system tells."""
    try:
        import resource
    except ImportError:  # not a Unix
        return Memory(None, None)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        with open("/proc/self/statm") as statm:
            return Memory(int(statm.read().split()[1]) * resource.getpagesize(), peak)
    except OSError:  # no /proc
        return Memory(None, peak)
