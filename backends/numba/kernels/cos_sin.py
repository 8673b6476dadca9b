"""`cos_sin`: cosines and sines of positions times frequencies, in one loop."""

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
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.layers.rope_config import RopeConfig
from xformer.layers.rope_tables import cos_sin as op
from xformer.layers.rope_tables import frequencies as frequencies_of

COST = 16  # one angle takes the time of this number of elements of a simple loop


def unsupported(positions: Array, *, config: RopeConfig, length: int, dtype: Any) -> str | None:
    """Return why the numba kernel of `cos_sin` cannot run, or None if it can.

    It needs at least one position, int64 positions that are no constant of the program, and
    float32 tables.
    """
    if positions.is_constant:
        return "the positions are constant"
    if positions.dtype != np.int64 or dtype != np.float32:
        return "only float32 tables of int64 positions"
    return None if positions.size else "there are no positions"


@kernel(op, "numba.kernels", unsupported=unsupported)
def cos_sin(
    positions: Array, *, config: RopeConfig, length: int, dtype: Any
) -> tuple[Array, Array]:
    """Return cos and sin (..., R/2) in float32, computed from angles in float64."""
    values, factor = frequencies_of(config, length)
    program, frequencies = program_of(positions), np.array(values, np.float64)
    outs = [program.fresh((*positions.shape, len(values)), np.float32) for _ in range(2)]

    def run(cos: Any, sin: Any, positions: Any, frequencies: Any) -> None:
        angles = positions[..., None] * frequencies
        np.copyto(cos, factor * np.cos(angles), casting="same_kind")
        np.copyto(sin, factor * np.sin(angles), casting="same_kind")

    numbers = positions.size, len(values), bits(factor)
    compiled = Native(fill_tables, numbers, program.pieces(COST * outs[0].size))
    program.emit("cos_sin", run, outs, [contiguous(positions), frequencies], compiled)
    return outs[0], outs[1]


@native
def fill_tables(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute a piece of the rows of factor * cos(angle) and factor * sin(angle).

    angle = position * frequency, in float64.

    outputs: cos, sin (N, R/2); inputs: positions (N,) int64, frequencies (R/2,) float64. integers:
    N, R/2, bits of the factor.
    """
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
