"""Initial weights: drawn on the host from a seeded generator, the same on every backend.

`rng` is a `xformer.backends.Generator`, made by `backend.generator(seed, dtype)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from xformer.backends.base import Generator
from xformer.typing import Array

Draw = Callable[[Generator, tuple[int, int]], Array]


def normal(rng: Generator, shape: Sequence[int], *, std: float = 0.02) -> Array:
    """Normal numbers of mean 0 and standard deviation `std` (GPT-2's 0.02 by default)."""
    return rng.normal(shape, std=std)


def xavier_uniform(rng: Generator, shape: tuple[int, int], *, gain: float = 1.0) -> Array:
    """Uniform in [-a, a), a = gain * sqrt(6 / (I + O)), shape (I, O) (Glorot, Bengio 2010)."""
    bound = gain * math.sqrt(6 / sum(_two(shape)))
    return rng.uniform(shape, low=-bound, high=bound)


def xavier_normal(rng: Generator, shape: tuple[int, int], *, gain: float = 1.0) -> Array:
    """Normal of standard deviation gain * sqrt(2 / (I + O)), shape (I, O)."""
    return rng.normal(shape, std=gain * math.sqrt(2 / sum(_two(shape))))


def _two(shape: Sequence[int]) -> Sequence[int]:
    if len(shape) != 2:
        raise ValueError(f"Xavier initialisation is for (I, O) weights, got shape {tuple(shape)}")
    return shape
