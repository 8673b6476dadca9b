"""`dropout` block by block; the mask is kept as bits: making it again would cost most of all."""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

import numpy as np

from xformer.backends.numpy.philox import words
from xformer.backends.numpy.rows import BLOCK, flat, masked
from xformer.backends.numpy.threads import blocks
from xformer.checks import require_shape
from xformer.dispatch import kernel
from xformer.ops.dropout import dropout as reference
from xformer.ops.dropout import require_rate
from xformer.ops.random_bits import Key
from xformer.typing import Array


def all_or_none(x: Array, *, rate: float, key: Key | None) -> str | None:
    """Why the kernel cannot run."""
    if isinstance(rate, Real) and 0 < rate < 1 - 2**-32:
        return None
    return "nothing is drawn at a rate of 0 or 1"


@kernel(reference, "numpy", unsupported=all_or_none)
def dropout(x: Array, *, rate: float, key: Key | None) -> tuple[Array, DropoutCache]:
    """Draw the bits of a block, keep one for each element, and apply them."""
    rate = require_rate("dropout", "rate", rate, "key", key)
    lowest = np.uint32(round(rate * 2**32))  # of the 2^32 words the lowest that keeps
    bits = np.empty(-(-x.size // 8), np.uint8)

    def piece(start: int, stop: int) -> None:
        keep = words(key, np.array([start]), stop - start)[0] >= lowest
        bits[start // 8 : -(-stop // 8)] = np.packbits(keep)

    blocks(piece, x.size, BLOCK)
    return _drop(x, rate, bits), DropoutCache(rate, bits, x.shape)


class DropoutCache(NamedTuple):
    """What `dropout` keeps for its backward: a bit for each element."""

    rate: float
    bits: Array  # (N / 8,)
    shape: tuple[int, ...]

    def backward(self, dy: Array) -> Array:
        """dx = dy * keep / (1 - rate), with the forward mask."""
        require_shape("dropout", "dy", dy, self.shape)
        return _drop(dy, self.rate, self.bits)


def _drop(x: Array, rate: float, bits: Array) -> Array:
    y = np.empty(x.shape, x.dtype)
    xs, ys = flat(x), flat(y)

    def piece(start: int, stop: int) -> None:
        y = ys[start:stop]
        keep = np.unpackbits(bits[start // 8 : -(-stop // 8)], count=stop - start)
        np.divide(xs[start:stop], 1 - rate, out=y)
        masked(y, keep, out=y)

    blocks(piece, xs.size, BLOCK)
    return y
