"""Kernels for NumPy's arrays, compiled by numba (extra `numba`).

    with xformer.kernels("numba"): ...

There they are asked before the kernels of `xformer.backends.numpy`, which compute the rest: float64
above all. Compiling takes half a minute once on a machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
from xformer.backends import numpy
from xformer.backends.base import Backend
from xformer.backends.numba import (
    adam,
    embedding,
    gelu,
    gemm,
    glu,
    layer_norm,
    linear,
    linear_cross_entropy,
    registers,
    rms_norm,
    sdpa,
)
from xformer.backends.numpy.products import MULTIPLY

from xformer import ops
from xformer.dispatch import Overridable, kernel
from xformer.optim.adam import adam_update

__all__ = ["KERNELS", "backend"]

KERNELS: tuple[tuple[Overridable, Any, Any], ...] = (
    (adam_update, adam.adam_update, adam.not_float32),
    (ops.embedding, embedding.embedding, embedding.not_float32),
    (ops.gelu, gelu.gelu, gelu.not_float32),
    (ops.glu, glu.glu, glu.not_float32_silu),
    (ops.layer_norm, layer_norm.layer_norm, layer_norm.outside),
    (ops.linear, linear.linear, linear.other),
    (
        ops.linear_cross_entropy,
        linear_cross_entropy.linear_cross_entropy,
        linear_cross_entropy.outside,
    ),
    (ops.rms_norm, rms_norm.rms_norm, rms_norm.no_gain),
    (ops.sdpa, sdpa.sdpa, sdpa.outside),
)


for _op, _run, _unsupported in KERNELS:
    kernel(_op, "numba", unsupported=_unsupported)(_run)
MULTIPLY["numba"] = gemm.multiply if registers.USABLE else gemm.by_numpy


def backend(device: str | None = None) -> Backend:
    """NumPy's backend under another name."""
    return replace(numpy.backend(device), name="numba", version=numba.__version__)
