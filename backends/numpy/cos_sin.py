"""`cos_sin` for decoding: rows of cached tables."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from xformer.base.typing import Array
from xformer.dispatch import is_inference, kernel
from xformer.layers.rope_config import RopeConfig
from xformer.layers.rope_tables import cos_sin as reference

ROWS = 256  # positions of a table


def unsupported(positions: Array, *, config: RopeConfig, length: int, dtype: Any) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    if positions.shape != (1,) or length or not is_inference():
        return "not one position within inference(), or frequencies that depend on the length"
    return None


@kernel(reference, "numpy", unsupported=unsupported)
def cos_sin(
    positions: Array, *, config: RopeConfig, length: int, dtype: Any
) -> tuple[Array, Array]:
    """Return cos and sin of one position, views of a cached table."""
    table, row = divmod(int(positions[0]), ROWS)
    cos, sin = _table(table, config, length, dtype)
    return cos[row : row + 1], sin[row : row + 1]


@functools.lru_cache(maxsize=64)
def _table(table: int, config: RopeConfig, length: int, dtype: Any) -> tuple[Array, Array]:
    """Return cos and sin of the positions from ROWS * table on, as read-only arrays."""
    positions = np.arange(ROWS * table, ROWS * (table + 1))
    tables = reference.reference(positions, config=config, length=length, dtype=dtype)
    for array in tables:
        array.flags.writeable = False
    return tables
