"""`dropout`: forward and backward both compute the random words again, so no mask is stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba import philox
from xformer.backends.numba.jit import elementwise
from xformer.backends.numba.kernels.layout import record, recorded
from xformer.backends.numba.program.copies import astype, contiguous
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.native import LINE
from xformer.backends.numba.program.traced import Traced, constant
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_shape
from xformer.ops.dropout import require_rate
from xformer.ops.random_bits import MASK, RandomKey

BLOCKS = 64  # blocks of four random words that one call of Philox computes


def _refuses(x: Array, *, rate: Any, key: RandomKey | None) -> str | None:
    if type(rate) is not float or not 0 < rate < 1 - 2**-32:
        return "at a rate of 0 or 1 there are no random words"
    step = key.step if key is not None else None
    if isinstance(step, Traced) and (step.shape or step.dtype.kind not in "iu"):
        return "the step is not a single integer"
    return None


@recorded(ops.dropout, _refuses)
def dropout(x: Array, *, rate: float, key: RandomKey | None) -> tuple[Array, NumbaDropoutCache]:
    """y = x * keep / (1 - rate), keep a random mask of 0 and 1."""
    rate = require_rate("dropout", "rate", rate, "key", key)
    assert key is not None
    return _drop("dropout", x, rate, key), NumbaDropoutCache(rate, key, x.shape)


@short
class NumbaDropoutCache(NamedTuple):
    """Saved by `dropout` for backward, which computes the same mask from the key again."""

    rate: float
    key: RandomKey
    shape: tuple[int, ...]

    def backward(self, dy: Array) -> Array:
        """dx = dy * keep / (1 - rate), with the forward mask."""
        require_shape("dropout", "dy", dy, self.shape)
        return _drop("dropout backward", dy, self.rate, self.key)


def _drop(name: str, x: Array, rate: float, key: RandomKey) -> Array:
    """Record the instruction `name`, and return x * keep / (1 - rate)."""
    step = key.step if isinstance(key.step, Traced) else constant(np.array(key.step, np.int64))
    numbers: Any = {
        "lowest": round(rate * 2**32),
        "seed_low": key.seed & MASK,
        "seed_high": key.seed >> 32,
        "site": key.site,
        "divisor": 1 - rate,
    }
    return record(drop, name, contiguous(x), astype(step, np.int64), **numbers)[0]


@declared("y (N) <- x (N), step () int64", unit=LINE)
def drop(
    y: Any,
    x: Any,
    step: Any,
    start: int,
    lowest: int,
    seed_low: int,
    seed_high: int,
    site: int,
    divisor: float,
) -> None:
    """Apply dropout to x. An element is kept, and divided, if its random word >= lowest."""
    drawn, kept, factor = np.empty((4, BLOCKS), np.uint32), np.uint32(lowest), np.float32(divisor)
    for first in range(0, len(x), 4 * BLOCKS):
        at = slice(first, first + 4 * BLOCKS)
        philox.words((start + first) // 4, seed_low, seed_high, step[0], site, drawn)
        _apply(drawn, kept, x[at], factor, y[at])


@elementwise
def _apply(drawn: Any, lowest: Any, x: Any, divisor: Any, y: Any) -> None:
    """Write y = x / divisor where the random word is at least `lowest`, else 0. x, y: (n,).

    drawn: words (4, BLOCKS); element i has word drawn[i % 4, i // 4]. The reference divides too:
    multiplying by 1 / divisor would round differently.
    """
    zero, whole = np.float32(0), x.size // 4
    for i in range(whole):
        for j in range(4):
            scaled = x[4 * i + j] / divisor  # computed in any case, so that there is no branch
            y[4 * i + j] = scaled if drawn[j, i] >= lowest else zero
    for i in range(4 * whole, x.size):
        y[i] = x[i] / divisor if drawn[i - 4 * whole, whole] >= lowest else zero
