"""Kernels for NumPy arrays, compiled by numba (extra `numba`).

    with xformer.kernels("numba"): ...

Within this context they are tried before the kernels of `xformer.backends.numpy`, which compute
what numba's kernels do not support, such as float64. The first use compiles kernels
(`docs/compile.md`, "The first use").
"""

from __future__ import annotations

from dataclasses import replace

import numba

from xformer import layers, ops
from xformer.backends import numpy
from xformer.backends.numba.single_op import Eager
from xformer.dispatch import kernel
from xformer.dispatch.backend import Backend
from xformer.optim.adam import adam_update

__all__ = ["KERNELS", "backend"]

KERNELS = (
    Eager(adam_update, donates=(0, 2, 3), varying=("rate", "root", "keep")),
    Eager(layers.blocks, matmuls=True),
    Eager(ops.gelu, file="activations"),
    Eager(ops.glu),
    Eager(ops.layer_norm),
    Eager(ops.linear, matmuls=True),
    Eager(ops.linear_cross_entropy, matmuls=True),
    Eager(ops.rms_norm),
    Eager(ops.sdpa),
)


for _eager in KERNELS:
    kernel(_eager.op, "numba", unsupported=_eager.unsupported)(_eager)


def backend(device: str | None = None) -> Backend:
    """Return NumPy's backend with the name "numba" and numba's version."""
    return replace(numpy.backend(device), name="numba", version=numba.__version__)
