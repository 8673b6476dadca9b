"""Dropout whose mask is recomputed, not stored."""

from __future__ import annotations

import math
from typing import NamedTuple

from array_api_compat import array_namespace

from xformer.dispatch import overridable
from xformer.ops.random_bits import Key, random_bits
from xformer.shapes import shapes
from xformer.typing import Array


@overridable
@shapes("x (...)")
def dropout(x: Array, *, rate: float, key: Key | None) -> tuple[Array, DropoutCache]:
    """y = x * keep / (1 - rate), keep zero with probability `rate` (arXiv:1207.0580, inverted).

    The bits of `key` decide: the same key gives the same mask on every backend. rate 0 gives x,
    rate 1 gives zeros.

    x, y: any shape. ValueError where rate is outside [0, 1]; TypeError where rate > 0 and key is
    no Key. Derivation: docs/derivations/dropout.md
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout: rate must lie in [0, 1], got {rate}")
    return _drop(x, rate, key), DropoutCache(rate, key)


class DropoutCache(NamedTuple):
    """What `dropout` keeps for its backward: no array."""

    rate: float
    key: Key | None

    def backward(self, dy: Array) -> Array:
        """dx = dy * keep / (1 - rate), with the forward mask."""
        return _drop(dy, self.rate, self.key)


def _drop(x: Array, rate: float, key: Key | None) -> Array:
    if rate == 0:
        return x
    xp = array_namespace(x)
    if rate == 1:
        return xp.zeros_like(x)
    bits = random_bits(x, key=key, size=math.prod(x.shape))
    keep = xp.reshape(bits >= round(rate * 2**32), x.shape)
    return xp.where(keep, x / (1 - rate), 0.0)
