"""`dropout`, whose words are made where they are used, forward and backward."""

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
from xformer.checks import require_shape
from xformer.dispatch import kernel
from xformer.ops.dropout import require_rate
from xformer.ops.random_bits import MASK, RandomKey
from xformer.showing import short
from xformer.typing import Array

BLOCKS = 64  # of four words, made at once


def unsupported(x: Array, *, rate: Any, key: RandomKey | None) -> str | None:
    """Why the kernel cannot run."""
    if not isinstance(rate, float) or not 0 < rate < 1 - 2**-32:
        return "nothing is drawn at a rate of 0 or 1"
    step = key.step if key is not None else None
    if isinstance(step, Traced) and (step.shape or step.dtype.kind not in "iu"):
        return "the step is no single integer"
    return unrecordable(x)


@kernel(ops.dropout, "numba.kernels", unsupported=unsupported)
def dropout(x: Array, *, rate: float, key: RandomKey | None) -> tuple[Array, DropoutCache]:
    """y = x * keep / (1 - rate)."""
    rate = require_rate("dropout", "rate", rate, "key", key)
    assert key is not None
    return _drop("dropout", x, rate, key), DropoutCache(rate, key, x.shape)


@short
class DropoutCache(NamedTuple):
    """Saved by `dropout` for backward: no array."""

    rate: float
    key: RandomKey
    shape: tuple[int, ...]

    def backward(self, dy: Array) -> Array:
        """dx = dy * keep / (1 - rate), with the forward mask."""
        require_shape("dropout", "dy", dy, self.shape)
        return _drop("dropout backward", dy, self.rate, self.key)


def _drop(name: str, x: Array, rate: float, key: RandomKey) -> Array:
    program, x, step = program_of(x, key.step), contiguous(x), key.step
    step = step if isinstance(step, Traced) else constant(np.array(step, np.int64))
    y = program.fresh(x.shape, x.dtype)

    def run(y: Any, x: Any, step: Any) -> None:
        own = key._replace(step=int(step))
        np.copyto(y, ops.dropout.reference(x, rate=rate, key=own)[0])

    numbers = x.size, round(rate * 2**32), key.seed & MASK, key.seed >> 32, key.site
    own = Native(drop, (*numbers, bits(1 - rate)), program.pieces(x.size))
    program.emit(name, run, [y], [x, astype(step, np.int64)], own)
    return y


@native
def drop(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; x, step, how many, the lowest word that keeps, seed low, seed high, site, 1 - rate."""
    a = words(args, 9)
    start, stop = part(a[3], piece, pieces, LINE)
    step, drawn = words(a[2], 1)[0], np.empty((4, BLOCKS), np.uint32)
    lowest, rest = np.uint32(a[4]), np.float32(real(a[8]))
    for at in range(start, stop, 4 * BLOCKS):
        philox.words(at // 4, a[5], a[6], step, a[7], drawn)
        n = (min(4 * BLOCKS, stop - at),)
        _apply(drawn, lowest, float32s(a[1] + 4 * at, n), rest, float32s(a[0] + 4 * at, n))


@elementwise
def _apply(drawn: Any, lowest: Any, x: Any, rest: Any, y: Any) -> None:
    """Quotients, as in the reference: a product with 1 / rest would be rounded otherwise."""
    zero, whole = np.float32(0), x.size // 4
    for i in range(whole):
        for j in range(4):
            kept = x[4 * i + j] / rest  # before it is asked whether: no branch
            y[4 * i + j] = kept if drawn[j, i] >= lowest else zero
    for i in range(4 * whole, x.size):
        y[i] = x[i] / rest if drawn[i - 4 * whole, whole] >= lowest else zero
