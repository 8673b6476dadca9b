"""Initial weights, drawn on the host from a seeded generator. Every backend gets the same numbers.

`rng` is an `xformer.backends.Generator`; `backend.generator(seed, dtype)` returns one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array, Tree
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import number, require_sizes

Draw = Callable[[Generator, tuple[int, int]], Array]

# Dotted names of weights in a residual branch, each after a dot; experts have no ".w".
PROJECTIONS = (
    *(".attn.q.w", ".cross.q.w", ".kv.k.w", ".kv.v.w", ".memory.k.w", ".memory.v.w"),
    *(".attn.q.down.w", ".attn.q.up.w", ".attn.kv.down.w", ".attn.kv.up.w"),
)
HIDDEN = (".ffn.up.w", ".ffn.gate.w", ".ffn.up", ".ffn.gate")
BRANCH = re.compile(r"(.*\.(?:attn|cross|ffn))\.")
LAST = (".attn.o.w", ".cross.o.w", ".ffn.down.w", ".ffn.down", ".head.w")


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


def fixup(params: Tree, *, n_branches: int) -> Tree:
    """`params` with weights by the rules of Fixup (arXiv:1901.09321, section 3).

    - The last weights of each residual branch, and those of a head that is not tied, are 0.
    - The other weights of a branch are multiplied by L^(-1 / (2m - 2)): m = 2 for attention and
      for a feed-forward network, 3 for one with a gate. m is the number of weight matrices whose
      product gives the size of the output. Queries and keys do not count.

    Everything else stays as it is. The rules are for blocks with norm_placement "none", and with
    residual_scale 1 for the multipliers of the paper.

    params: of a model, or of its stack
    n_branches: L, the number of sublayers: 2 for each layer, 3 for one with cross-attention

    ValueError unless n_branches is an int of at least 1, and for params without sublayers.
    """
    (n_branches,) = require_sizes("fixup", 1, n_branches=n_branches)
    names = [f".{name}" for name in tree.flatten(params)]
    gated = {name.partition(".ffn.gate")[0] for name in names if ".ffn.gate" in name}

    def factor(name: str) -> float:
        if name.endswith(LAST):
            return 0.0
        if name.endswith(HIDDEN):
            m = 3 if name.partition(".ffn.")[0] in gated else 2
        elif name.endswith(PROJECTIONS):
            m = 2
        else:
            return 1.0
        return float(n_branches ** (-1 / (2 * m - 2)))

    factors = [factor(name) for name in names]
    branches, ends = (
        {match[1] for name in some if (match := BRANCH.match(name))}
        for some in (names, [name for name in names if name.endswith(LAST)])
    )
    if not branches:
        raise ValueError("fixup: params must have sublayers, such as those of a GPT, got none")
    if without := sorted(branches - ends):
        raise ValueError(
            f"fixup: each sublayer must end with a linear layer, got none in {without[0][1:]}"
        )
    rest = iter(factors)
    return tree.map(lambda w: _times(w, next(rest)), params)


def _times(w: Array, factor: float) -> Array:
    """w, 0 or a multiple of it."""
    if factor == 0.0:
        return array_namespace(w).zeros_like(w)
    return w if factor == 1.0 else w * factor


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
