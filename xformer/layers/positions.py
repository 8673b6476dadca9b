"""Positional encodings."""

from __future__ import annotations

import functools
import math
from typing import Any

from array_api_compat import array_namespace, device

from xformer.typing import Array


def sinusoidal(length: int, width: int, *, like: Array) -> Array:
    """p[t, 2i] = sin(t / 10000^(2i / D)), p[t, 2i+1] = cos of the same (arXiv:1706.03762, 3.5).

    Returns (length, width), of the library, dtype and device of `like`; D = width. ValueError for
    negative sizes.
    """
    if min(length, width) < 0:
        raise ValueError(f"sinusoidal: sizes must not be negative, got ({length}, {width})")
    xp = array_namespace(like)
    table = xp.asarray(_table(length, width), dtype=like.dtype, device=device(like))
    return xp.reshape(table, (length, width))  # a list of no rows has lost its width


@functools.lru_cache(maxsize=8)
def _table(length: int, width: int) -> Any:
    # In float64 on the host: an angle in float32 would be off by more than rounding at large t.
    rates = [10000.0 ** (-(i - i % 2) / width) for i in range(width)]
    return [
        [math.cos(t * r) if i % 2 else math.sin(t * r) for i, r in enumerate(rates)]
        for t in range(length)
    ]
