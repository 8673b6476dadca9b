"""`dropout` in blocks of rows. The mask is saved as bits: to draw it again would take longest."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from xformer.backends.numpy.philox import words
from xformer.backends.numpy.rows import masked, row_blocks, rows
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_shape
from xformer.ops.dropout import dropout as reference
from xformer.ops.dropout import require_rate
from xformer.ops.random_bits import RandomKey


def unsupported(x: Array, *, rate: Any, key: RandomKey | None) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    if isinstance(rate, float) and 0 < rate < 1 - 2**-32:
        return None
    return "nothing is drawn at a rate of 0 or 1"


@kernel(reference, "numpy", unsupported=unsupported)
def dropout(x: Array, *, rate: float, key: RandomKey | None) -> tuple[Array, NumpyDropoutCache]:
    """y = x * keep / (1 - rate). The mask `keep` is drawn, packed and applied block by block."""
    rate = require_rate("dropout", "rate", rate, "key", key)
    lowest = np.uint32(round(rate * 2**32))  # elements with a random word >= lowest are kept
    y, xs = np.empty(x.shape, x.dtype), rows(np.atleast_1d(x))
    ys, (n, width) = y.reshape(xs.shape), xs.shape
    bits = np.empty((n, -(-width // 8)), np.uint8)

    def piece(start: int, stop: int) -> None:
        first = np.array([start * width])
        keep = words(cast(RandomKey, key), first, (stop - start) * width)[0] >= lowest
        keep = keep.reshape(-1, width)
        bits[start:stop] = np.packbits(keep, axis=-1)
        _drop(xs[start:stop], rate, keep, ys[start:stop])

    if width:
        row_blocks(piece, n, width)
    return y, NumpyDropoutCache(rate, bits, x.shape)


@short
class NumpyDropoutCache(NamedTuple):
    """Saved by `dropout` for backward: the mask, one bit for each element."""

    rate: float
    bits: Array  # (N, D / 8 rounded up), uint8, for x as (N, D)
    shape: tuple[int, ...]

    def backward(self, dy: Array) -> Array:
        """dx = dy * keep / (1 - rate), with the forward mask."""
        require_shape("dropout", "dy", dy, self.shape)
        dx, dys = np.empty(dy.shape, dy.dtype), rows(np.atleast_1d(dy))
        dxs, (n, width) = dx.reshape(dys.shape), dys.shape

        def piece(start: int, stop: int) -> None:
            keep = np.unpackbits(self.bits[start:stop], axis=-1, count=width)
            _drop(dys[start:stop], self.rate, keep, dxs[start:stop])

        row_blocks(piece, n, width)
        return dx


def _drop(x: Array, rate: float, keep: Array, out: Array) -> None:
    """Write x * keep / (1 - rate) to `out`."""
    np.divide(x, 1 - rate, out=out)
    masked(out, keep, out=out)
