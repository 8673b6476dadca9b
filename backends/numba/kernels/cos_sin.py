"""`cos_sin`: cosines and sines of positions times frequencies, in one loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends.numba.kernels.layout import record
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.program import program_of
from xformer.backends.numba.program.traced import constant
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
    frequencies = constant(np.array(values, np.float64))
    pieces = program_of(positions).pieces(COST * positions.size * len(values))
    cos, sin = record(fill_tables, "cos_sin", positions, frequencies, pieces=pieces, factor=factor)
    return cos, sin


@declared("cos (N, F), sin (N, F) <- positions (N) int64, frequencies (F) float64")
def fill_tables(cos: Any, sin: Any, positions: Any, frequencies: Any, factor: float) -> None:
    """Compute factor * cos(angle) and factor * sin(angle), angle = position * frequency."""
    for i in range(len(positions)):
        for j in range(len(frequencies)):
            angle = np.float64(positions[i]) * frequencies[j]
            cos[i, j] = np.float32(factor * math.cos(angle))
            sin[i, j] = np.float32(factor * math.sin(angle))
