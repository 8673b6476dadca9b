"""Initial weights, drawn on the host from a seeded generator. Every backend gets the same numbers.

`rng` is an `xformer.backends.Generator`; `backend.generator(seed, dtype)` returns one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.backends import Generator
from xformer.checks import number
from xformer.typing import Array

Draw = Callable[[Generator, tuple[int, int]], Array]


def normal(rng: Generator, shape: Sequence[int], *, std: float = 0.02) -> Array:
    """Normal numbers of mean 0 and standard deviation `std` (default 0.02, as in GPT-2)."""
    return rng.normal(shape, std=number("normal", "std", std, low=0))


def xavier_uniform(rng: Generator, shape: tuple[int, int], *, gain: float = 1.0) -> Array:
    """Uniform numbers in [-a, a), a = gain * sqrt(6 / (I + O)), for shape (I, O).

    Glorot and Bengio, 2010. ValueError unless the shape has two axes.
    """
    bound = number("xavier_uniform", "gain", gain, low=0) * math.sqrt(6 / _fans(shape))
    return rng.uniform(shape, low=-bound, high=bound)


def xavier_normal(rng: Generator, shape: tuple[int, int], *, gain: float = 1.0) -> Array:
    """Normal numbers of mean 0 and standard deviation gain * sqrt(2 / (I + O)), for shape (I, O).

    Glorot and Bengio, 2010. ValueError unless the shape has two axes.
    """
    std = number("xavier_normal", "gain", gain, low=0) * math.sqrt(2 / _fans(shape))
    return rng.normal(shape, std=std)


def _fans(shape: Sequence[int]) -> int:
    """I + O, at least 1. ValueError unless the shape has two axes."""
    if len(shape) != 2:
        raise ValueError(f"Xavier initialisation is for (I, O) weights, got shape {tuple(shape)}")
    return max(sum(shape), 1)


@dataclass(frozen=True)
class Shape:
    """A stand-in for an initial weight: its shape, without memory."""

    shape: tuple[int, ...]

    def __mul__(self, other: Any) -> Shape:
        return self


class Shapes:
    """A stand-in for a generator, with which `init_from` returns a tree of `Shape`."""

    def draw(self, shape: Sequence[int], *args: Any, **options: Any) -> Shape:
        """A `Shape` of the requested shape."""
        return Shape(tuple(shape))

    normal = uniform = full = draw

    def stack(self, draw: Callable[[], Shape], n: int) -> Shape:
        """The shape of `n` draws along a new first axis."""
        return Shape((n, *draw().shape))
