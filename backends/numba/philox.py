"""The words of `random_bits` from any block of the stream on, several blocks at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.jit import elementwise
from xformer.ops.random_bits import MASK, MULTIPLIERS, ROUNDS, WEYL

LOW, HALF = np.uint64(MASK), np.uint64(32)
M0, M1 = map(np.uint64, MULTIPLIERS)
WEYL0, WEYL1 = map(np.uint64, WEYL)


@elementwise
def words(first: int, seed_low: int, seed_high: int, step: int, site: int, out: Any) -> None:
    """Write blocks number first, first + 1, ... of a stream to the columns of out, uint32 (4, N).

    seed_low, seed_high: the two words of the seed. step, site: as of `RandomKey`.
    Blocks are columns so that the compiler vectorises the rounds. Bits above 32 are cut off only
    before products and at the end, since sums and xor do not carry them into lower bits.
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
