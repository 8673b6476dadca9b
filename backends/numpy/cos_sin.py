"""`cos_sin` of a text that grows: rows of tables that are kept."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from xformer.dispatch import is_inference, kernel
from xformer.layers.rope_config import RopeConfig
from xformer.layers.rope_tables import cos_sin as reference
from xformer.typing import Array

ROWS = 256  # of a table


def unsupported(positions: Array, *, config: RopeConfig, length: int, dtype: Any) -> str | None:
    """Why the kernel cannot run."""
    if positions.shape != (1,) or length or not is_inference():
        return "not one position within inference(), or frequencies that go by it"
    return None


@kernel(reference, "numpy", unsupported=unsupported)
def cos_sin(
    positions: Array, *, config: RopeConfig, length: int, dtype: Any
) -> tuple[Array, Array]:
    """A row of a table."""
    table, row = divmod(int(positions[0]), ROWS)
    cos, sin = _table(table, config, length, dtype)
    return cos[row : row + 1], sin[row : row + 1]


@functools.lru_cache(maxsize=64)
def _table(table: int, config: RopeConfig, length: int, dtype: Any) -> tuple[Array, Array]:
    """For positions from ROWS table on; nobody can write to it."""
    positions = np.arange(ROWS * table, ROWS * (table + 1))
    found = reference.reference(positions, config=config, length=length, dtype=dtype)
    for part in found:
        part.flags.writeable = False
    return found
