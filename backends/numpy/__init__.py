"""NumPy: the default backend, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy

from xformer.dispatch import is_reference_only, kernels
from xformer.dispatch.backend import Backend
from xformer.dispatch.subclasses import refusal

__all__ = ["NumpyBackend", "backend", "refusal", "xp"]

xp: Any = numpy


class NumpyBackend(Backend):
    """NumPy on the CPU. `name` says which kernels run within `active()`: numpy, numba or mkl."""

    def active(self) -> AbstractContextManager[None]:
        """Return the context `xformer.kernels(name)` of this backend."""
        return kernels(self.name)

    def compiled(
        self, fn: Callable[..., Any], donated: Sequence[int], *, lends: bool = False
    ) -> Callable[..., Any] | None:
        """Return `fn` as a program of numba's kernels; None if numba is not installed."""
        try:
            from xformer.backends.numba.program.compiled import Compiled
        except ImportError:
            return None
        return Compiled(fn, donated, lends=lends)

    def records(self, dtype: Any) -> bool:
        """Return True for float32 on backend numba: programs have kernels for float32 only."""
        return bool(dtype == numpy.float32 and self.name == "numba" and not is_reference_only())


def backend(device: str | None = None) -> Backend:
    """Return the NumPy backend; its only device is "cpu"."""
    if device not in (None, "cpu"):
        raise ValueError(f"backend numpy has one device, cpu, got {device!r}")
    return NumpyBackend("numpy", xp, None, ("float32", "float64"), numpy.__version__)
