"""`dropout`: one launch draws random bits and applies them."""

from __future__ import annotations

from typing import NamedTuple

from xformer.backends.cupy.module import EVERY, Source, blocks, contiguous, empty, launch, wide
from xformer.backends.cupy.random_bits import not_a_step, words
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_shape
from xformer.dispatch.shapes import STORED
from xformer.ops.dropout import dropout as reference
from xformer.ops.dropout import require_rate
from xformer.ops.random_bits import RandomKey

SOURCE = Source(__file__, dtypes=EVERY, WIDE=(0, 1))
BLOCK = 256  # threads; each computes four elements


def unsupported(x: Array, *, rate: float, key: RandomKey | None) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return not_a_step(key, x)


@kernel(reference, "cupy", unsupported=unsupported, storage_dtypes=STORED)
def dropout(x: Array, *, rate: float, key: RandomKey | None) -> tuple[Array, CupyDropoutCache]:
    """Return (y = x * keep / (1 - rate), cache)."""
    rate = require_rate("dropout", "rate", rate, "key", key)
    return _drop(x, rate, key), CupyDropoutCache(rate, key, x.shape)


@short
class CupyDropoutCache(NamedTuple):
    """Saved by `dropout` for backward: the key, which gives the same mask again, but no mask."""

    rate: float
    key: RandomKey | None
    shape: tuple[int, ...]

    def backward(self, dy: Array) -> Array:
        """Return dx = dy * keep / (1 - rate), with the mask of forward."""
        require_shape("dropout", "dy", dy, self.shape)
        return _drop(dy, self.rate, self.key)


def _drop(x: Array, rate: float, key: RandomKey | None) -> Array:
    lowest = round(rate * 2**32)  # the lowest of the 2^32 random words that keeps an element
    if rate == 0 or key is None:
        return x
    if lowest == 2**32:
        return array_namespace(x).zeros_like(x)
    x, y = contiguous(x), empty(x)
    launch(
        SOURCE,
        "dropout",
        x,
        grid=(blocks(x.size, 4 * BLOCK),),
        block=(BLOCK,),
        args=(x, y, x.size, 1.0 - rate, lowest, *words(key)),
        WIDE=wide(x.size, x, y),
    )
    return y
