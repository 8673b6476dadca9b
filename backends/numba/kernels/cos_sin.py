"""`cos_sin`: cosines and sines of positions times frequencies, all of their formula at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends.numba.kernels.layout import program_of
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import (
    Native,
    bits,
    float32s,
    float64s,
    native,
    part,
    real,
    words,
)
from xformer.dispatch import kernel
from xformer.layers.rope_config import RopeConfig
from xformer.layers.rope_tables import cos_sin as op
from xformer.layers.rope_tables import frequencies as frequencies_of
from xformer.typing import Array

COSTS = 16  # elements of a simple loop in the time of an angle


def unsupported(positions: Array, *, config: RopeConfig, length: int, dtype: Any) -> str | None:
    """Why the kernel cannot run."""
    if positions.is_constant:
        return "all of it is constant"
    if positions.dtype != np.int64 or dtype != np.float32:
        return "only float32, of int64"
    return None if positions.size else "there are no positions"


@kernel(op, "numba.kernels", unsupported=unsupported)
def cos_sin(
    positions: Array, *, config: RopeConfig, length: int, dtype: Any
) -> tuple[Array, Array]:
    """cos and sin (..., R/2) in float32, of angles in float64."""
    found, factor = frequencies_of(config, length)
    program, frequencies = program_of(positions), np.array(found, np.float64)
    outs = [program.fresh((*positions.shape, len(found)), np.float32) for _ in range(2)]

    def run(cos: Any, sin: Any, positions: Any, frequencies: Any) -> None:
        angles = positions[..., None] * frequencies
        np.copyto(cos, factor * np.cos(angles), casting="same_kind")
        np.copyto(sin, factor * np.sin(angles), casting="same_kind")

    numbers = positions.size, len(found), bits(factor)
    own = Native(turn, numbers, program.pieces(COSTS * outs[0].size))
    program.emit("cos_sin", run, outs, [contiguous(positions), frequencies], own)
    return outs[0], outs[1]


@native
def turn(args: int, piece: int, pieces: int, memory: int) -> None:
    """cos, sin (N, R/2); positions (N,), frequencies (R/2,), N, R/2, the factor."""
    a = words(args, 7)
    n, width, factor = a[4], a[5], real(a[6])
    start, stop = part(n, piece, pieces, 1)
    positions, frequencies = words(a[2], n), float64s(a[3], (width,))
    cos, sin = float32s(a[0], (n, width)), float32s(a[1], (n, width))
    for i in range(start, stop):
        for j in range(width):
            angle = np.float64(positions[i]) * frequencies[j]
            cos[i, j] = np.float32(factor * math.cos(angle))
            sin[i, j] = np.float32(factor * math.sin(angle))
