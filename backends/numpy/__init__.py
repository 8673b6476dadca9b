"""NumPy: the default backend, on the CPU."""

from __future__ import annotations

import numpy
from xformer.backends.arrays import refusal
from xformer.backends.base import Backend
from xformer.backends.numpy.namespace import xp

__all__ = ["backend", "refusal"]


def backend(device: str | None = None) -> Backend:
    """The NumPy backend; its only device is "cpu"."""
    if device not in (None, "cpu"):
        raise ValueError(f"backend numpy has one device, cpu, got {device!r}")
    return Backend("numpy", xp, None, ("float32", "float64"), numpy.__version__)
