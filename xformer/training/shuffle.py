"""The random order of an epoch, computed for each index without memory for all of them.

It is a Feistel network over pairs (l, r), 0 <= l < a, 0 <= r < b, a b >= n (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002). Each round adds a random function of one half
to the other half, modulo its size, which is invertible for any function. A result of at least n
goes through the network again until it is below n. This is a bijection of the numbers below n.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.dispatch.checks import require_sizes

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
WORD = (1 << 64) - 1


def permuted(i: Any, n: int, *, seed: int, epoch: Any = 0) -> np.ndarray:
    """Element i of a random permutation of 0 .. n - 1: int64, of the shape of i.

    i, epoch: integers or arrays of integers. Each seed and epoch has another permutation.
    ValueError unless 0 <= i < n and seed is in [0, 2^64).
    """
    (n,) = require_sizes("permuted", 1, n=n)
    seed = require_seed("permuted", seed)
    index = np.asarray(i, np.int64)
    if index.size and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"permuted: i must lie in [0, {n}), got {index.min()} to {index.max()}")
    index, epochs = np.broadcast_arrays(index, np.asarray(epoch, np.int64))
    x = np.atleast_1d(index).astype(np.uint64)
    keys = _mixed(_mixed(np.asarray([seed + GOLDEN & WORD], np.uint64)) + _words(epochs))
    keys = np.broadcast_to(keys, x.shape)
    a = math.isqrt(n - 1) + 1  # a (a - 1) < n <= a^2, or one less, so that few are repeated
    b = -(-n // a)
    outside = np.ones(x.shape, np.bool_)
    while outside.any():
        x[outside] = _rounds(x[outside], keys[outside], a, b)
        outside = x >= n
    return x.astype(np.int64).reshape(index.shape)


def require_seed(what: str, seed: Any) -> int:
    """`seed` as an int. ValueError unless it is an integer in [0, 2^64)."""
    (plain,) = require_sizes(what, 0, seed=seed)
    if plain > WORD:
        raise ValueError(f"{what}: seed must be below 2^64, got {seed}")
    return plain


def _rounds(x: np.ndarray, keys: np.ndarray, a: int, b: int) -> np.ndarray:
    """One pass through the network of numbers below a b."""
    left, right = np.divmod(x, np.uint64(b))
    for step in range(0, ROUNDS, 2):
        left = (left + _drawn(right, keys, step) % np.uint64(a)) % np.uint64(a)
        right = (right + _drawn(left, keys, step + 1) % np.uint64(b)) % np.uint64(b)
    return left * np.uint64(b) + right


def _drawn(x: np.ndarray, keys: np.ndarray, step: int) -> np.ndarray:
    """Random words: a function of x, the key and the round."""
    return _mixed(_mixed(keys + np.uint64(step * GOLDEN & WORD)) + x)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _words(x: np.ndarray) -> np.ndarray:
    return np.atleast_1d(x).astype(np.uint64)
