"""The words of `random_bits` at any place, several blocks of four at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import elementwise
from xformer.ops.random_bits import MASK, MULTIPLIERS, ROUNDS, WEYL

LOW, HALF = np.uint64(MASK), np.uint64(32)
M0, M1 = map(np.uint64, MULTIPLIERS)
WEYL0, WEYL1 = map(np.uint64, WEYL)


@elementwise
def words(first: int, seed_low: int, seed_high: int, step: int, site: int, out: Any) -> None:
    """Blocks first, first + 1, ... of a stream. seed: its two words; out: uint32 (4, N).

    A block is a column: only so do vectors of counters go through the rounds. What is above 32 bits
    is cut off before a product alone, and at the end: sums and xor do not carry it down.
    """
    for i in range(out.shape[1]):
        number = np.uint64(first) + np.uint64(i)
        c0, c1, c2, c3 = number, number >> HALF, np.uint64(site), np.uint64(step)
        k0, k1 = np.uint64(seed_low), np.uint64(seed_high)
        for _ in range(ROUNDS):
            p0, p1 = M0 * (c0 & LOW), M1 * (c2 & LOW)
            c0, c1 = (p1 >> HALF) ^ c1 ^ k0, p1
            c2, c3 = (p0 >> HALF) ^ c3 ^ k1, p0
            k0, k1 = k0 + WEYL0, k1 + WEYL1
        out[0, i], out[1, i] = np.uint32(c0), np.uint32(c1)
        out[2, i], out[3, i] = np.uint32(c2), np.uint32(c3)
