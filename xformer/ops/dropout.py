"""Dropout whose mask is recomputed, not stored."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import number, require_shape
from xformer.dispatch.shapes import shapes
from xformer.ops.random_bits import RandomKey, random_bits, require_key


@overridable
@shapes("x (...)")
def dropout(x: Array, *, rate: float, key: RandomKey | None) -> tuple[Array, DropoutCache]:
    """y = x * keep / (1 - rate); keep is 0 with probability `rate` (arXiv:1207.0580, inverted).

    The same key gives the same mask on every backend. rate 0 gives x, rate 1 gives zeros.

    x, y: any shape. ValueError if rate is outside [0, 1]; TypeError if rate > 0 and key is not a
    `RandomKey`. Derivation: docs/derivations/dropout.md
    """
    rate = require_rate("dropout", "rate", rate, "key", key)
    return _drop(x, rate, key), DropoutCache(rate, key, x.shape)


@short
class DropoutCache(NamedTuple):
    """Saved by `dropout` for backward: no array."""

    rate: float
    key: RandomKey | None
    shape: tuple[int, ...]

    def backward(self, dy: Array) -> Array:
        """dx = dy * keep / (1 - rate), with the forward mask."""
        require_shape("dropout", "dy", dy, self.shape)
        return _drop(dy, self.rate, self.key)


def require_rate(
    op: str, rate_name: str, rate: float, key_name: str, key: RandomKey | None
) -> float:
    """The rate as a float.

    ValueError if it is outside [0, 1]; TypeError if it is not 0 and `key` is not a `RandomKey`.
    """
    rate = number(op, rate_name, rate, low=0, high=1)
    if rate != 0:
        require_key(op, key, key_name)
    return rate


def _drop(x: Array, rate: float, key: RandomKey | None) -> Array:
    if rate == 0:
        return x
    xp = array_namespace(x)
    lowest = round(rate * 2**32)  # the lowest of the 2^32 words for which an element is kept
    if lowest == 2**32:
        return xp.zeros_like(x)
    bits = random_bits(x, key=cast(RandomKey, key), size=math.prod(x.shape))
    # An array, as JAX converts a number to int32, and the words are uint32.
    keep = bits >= xp.full((), lowest, dtype=bits.dtype, device=device(x))
    return xp.where(xp.reshape(keep, x.shape), x / (1 - rate), 0.0)
