"""`greedy`, each row of logits once."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import elementwise
from xformer.backends.numba.kernels.layout import program_of, unrecordable
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.dispatch import kernel
from xformer.generation.samplers import greedy as op
from xformer.typing import Array


def unsupported(logits: Array) -> str | None:
    """Why the kernel cannot run."""
    if logits.ndim != 2 or 0 in logits.shape:
        return "logits are no rows"
    return unrecordable(logits)


@kernel(op, "numba.kernels", unsupported=unsupported)
def greedy(logits: Array) -> Array:
    """The first of the largest, -1 where that is no number, or one of them is none."""
    program, (n_rows, size) = program_of(logits), logits.shape
    chosen = program.fresh((n_rows,), np.int64)

    def run(chosen: Any, logits: Any) -> None:
        np.copyto(chosen, op.reference(logits))

    own = Native(first_largest, (n_rows, size), program.threads if n_rows > 1 else 1)
    program.emit("greedy", run, [chosen], [contiguous(logits)], own)
    return chosen


@native
def first_largest(args: int, piece: int, pieces: int, memory: int) -> None:
    """chosen (B,); logits (B, V), B, V. Pieces are rows."""
    a = words(args, 4)
    chosen = words(a[0], a[2])
    start, stop = part(a[2], piece, pieces, 1)
    for i in range(start, stop):
        chosen[i] = _of_row(float32s(a[1] + 4 * i * a[3], (a[3],)))


@elementwise
def _of_row(x: Any) -> Any:
    top, numbers = x[0], True
    for j in range(x.size):
        numbers &= x[j] == x[j]
        top = x[j] if x[j] > top else top
    if not numbers or top - top != 0:
        return -1
    for j in range(x.size):
        if x[j] == top:
            return j
    return -1
