"""NumPy: the default backend, on the CPU."""

from __future__ import annotations

import numpy
from xformer.backends.base import Backend
from xformer.backends.numpy import (
    adam,
    advance,
    append,
    blocks,
    clip,
    cross_entropy,
    dropout,
    ema,
    embedding,
    experts,
    gelu,
    glu,
    in_range,
    index_add,
    layer_norm,
    linear,
    linear_cross_entropy,
    linears,
    rms_norm,
    sdpa,
    turns,
)
from xformer.backends.numpy.namespace import xp

__all__ = [
    "adam",
    "advance",
    "append",
    "backend",
    "blocks",
    "clip",
    "cross_entropy",
    "dropout",
    "ema",
    "embedding",
    "experts",
    "gelu",
    "glu",
    "in_range",
    "index_add",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linears",
    "rms_norm",
    "sdpa",
    "turns",
]


def backend(device: str | None = None) -> Backend:
    """The NumPy backend; its only device is "cpu"."""
    if device not in (None, "cpu"):
        raise ValueError(f"backend numpy has one device, cpu, got {device!r}")
    return Backend("numpy", xp, None, ("float32", "float64"), numpy.__version__)
