"""Words of the stream of `random_bits` from any index on, in blocks that fit in the cache."""

from __future__ import annotations

import numpy as np

from xformer.base.typing import Array
from xformer.ops.random_bits import MASK, MULTIPLIERS, ROUNDS, WEYL, RandomKey

BLOCK = 1 << 14  # counters; the arrays for this many fit in a core's L2 cache
_LOW, _HIGH = np.uint64(MASK), np.uint64(32)


def words(key: RandomKey, starts: Array, width: int) -> Array:
    """Return words start, ..., start + width - 1 of the stream of `key` for each start.

    starts: (N,). The result is uint32 (N, width). It is fastest if all starts are multiples of 4.
    """
    first, shift = np.divmod(starts, 4)
    n = -(-(width + int(shift.max(initial=0))) // 4)
    counters = (first[:, None] + np.arange(n)).reshape(-1).astype(np.uint64)
    out = np.empty((counters.size, 4), np.uint32)
    for begin in range(0, counters.size, BLOCK):
        _philox(counters[begin : begin + BLOCK], key, out[begin : begin + BLOCK])
    out = out.reshape(len(starts), 4 * n)
    if shift.any():
        return np.take_along_axis(out, shift[:, None] + np.arange(width), axis=1)
    return out[:, :width]


def _philox(counters: Array, key: RandomKey, out: Array) -> None:
    """Write 4 words for each counter to `out` (N, 4), as `xformer.ops.random_bits.philox`.

    It multiplies in 64 bits and in place.
    """
    c0, c1 = counters & _LOW, counters >> _HIGH
    c2, c3 = np.full_like(c0, key.site), np.full_like(c0, int(key.step))
    k0, k1 = key.seed & MASK, key.seed >> 32
    for _ in range(ROUNDS):
        c2 *= np.uint64(MULTIPLIERS[1])
        c0 *= np.uint64(MULTIPLIERS[0])
        c1 ^= c2 >> _HIGH
        c1 ^= np.uint64(k0)
        c3 ^= c0 >> _HIGH
        c3 ^= np.uint64(k1)
        c2 &= _LOW
        c0 &= _LOW
        c0, c1, c2, c3 = c1, c2, c3, c0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    for i, c in enumerate((c0, c1, c2, c3)):
        out[:, i] = c
