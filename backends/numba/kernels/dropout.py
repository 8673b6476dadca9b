"""`dropout`: forward and backward both compute the random words again, so no mask is stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba import philox
from xformer.backends.numba.compiled import elementwise
from xformer.backends.numba.kernels.layout import program_of, unrecordable
from xformer.backends.numba.program.namespace import astype, contiguous
from xformer.backends.numba.program.native import (
    LINE,
    Native,
    bits,
    float32s,
    native,
    part,
    real,
    words,
)
from xformer.backends.numba.program.traced import Traced, constant
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_shape
from xformer.ops.dropout import require_rate
from xformer.ops.random_bits import MASK, RandomKey

BLOCKS = 64  # blocks of four random words that one call of Philox computes


def unsupported(x: Array, *, rate: Any, key: RandomKey | None) -> str | None:
    """Return why the numba kernel of `dropout` cannot run, or None if it can.

    It needs x in float32 that is no constant of the program; a float rate in (0, 1 - 2^-32); and a
    key whose step, if it is recorded, is a single integer.
    """
    if type(rate) is not float or not 0 < rate < 1 - 2**-32:
        return "at a rate of 0 or 1 there are no random words"
    step = key.step if key is not None else None
    if isinstance(step, Traced) and (step.shape or step.dtype.kind not in "iu"):
        return "the step is not a single integer"
    return unrecordable(x)


@kernel(ops.dropout, "numba.kernels", unsupported=unsupported)
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
    program, x, step = program_of(x, key.step), contiguous(x), key.step
    step = step if isinstance(step, Traced) else constant(np.array(step, np.int64))
    y = program.fresh(x.shape, x.dtype)

    def run(y: Any, x: Any, step: Any) -> None:
        step_key = key._replace(step=int(step))
        np.copyto(y, ops.dropout.reference(x, rate=rate, key=step_key)[0])

    numbers = x.size, round(rate * 2**32), key.seed & MASK, key.seed >> 32, key.site
    compiled = Native(drop, (*numbers, bits(1 - rate)), program.pieces(x.size))
    program.emit(name, run, [y], [x, astype(step, np.int64)], compiled)
    return y


@native
def drop(args: int, piece: int, pieces: int, memory: int) -> None:
    """Apply dropout to a piece of x.

    outputs: y (n,); inputs: x (n,), step () int64. integers: n, lowest (an element is kept if its
    random word >= lowest), low and high 32 bits of the seed, site, bits of 1 - rate.
    """
    a = words(args, 9)
    start, stop = part(a[3], piece, pieces, LINE)
    step, drawn = words(a[2], 1)[0], np.empty((4, BLOCKS), np.uint32)
    lowest, divisor = np.uint32(a[4]), np.float32(real(a[8]))
    for first in range(start, stop, 4 * BLOCKS):
        philox.words(first // 4, a[5], a[6], step, a[7], drawn)
        n = (min(4 * BLOCKS, stop - first),)
        _apply(drawn, lowest, float32s(a[1] + 4 * first, n), divisor, float32s(a[0] + 4 * first, n))


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
