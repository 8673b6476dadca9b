"""`greedy`: the id of the largest logit of each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import elementwise
from xformer.backends.numba.kernels.layout import program_of, unrecordable
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.ops.greedy import greedy as op


def unsupported(logits: Array) -> str | None:
    """Return why the numba kernel of `greedy` cannot run, or None if it can.

    It needs float32 logits (B, V) with B, V > 0 that are no constant of the program.
    """
    if logits.ndim != 2 or 0 in logits.shape:
        return "logits are not (B, V) with B, V > 0"
    return unrecordable(logits)


@kernel(op, "numba.kernels", unsupported=unsupported)
def greedy(logits: Array) -> Array:
    """Return the id (B,) of the largest logit of each row of `logits` (B, V), the first of equals.

    The id is -1 if a logit is NaN or the largest logit is not finite.
    """
    program, (n_rows, size) = program_of(logits), logits.shape
    chosen = program.fresh((n_rows,), np.int64)

    def run(chosen: Any, logits: Any) -> None:
        np.copyto(chosen, op.reference(logits))

    compiled = Native(largest_of_rows, (n_rows, size), program.threads if n_rows > 1 else 1)
    program.emit("greedy", run, [chosen], [contiguous(logits)], compiled)
    return chosen


@native
def largest_of_rows(args: int, piece: int, pieces: int, memory: int) -> None:
    """Find the largest logit of a piece of the rows.

    outputs: chosen (B,) int64; inputs: logits (B, V). integers: B, V.
    """
    a = words(args, 4)
    chosen = words(a[0], a[2])
    start, stop = part(a[2], piece, pieces, 1)
    for i in range(start, stop):
        chosen[i] = _first_largest(float32s(a[1] + 4 * i * a[3], (a[3],)))


@elementwise
def _first_largest(x: Any) -> Any:
    """Return the index of the largest element of x (V,), or -1 as in `greedy`."""
    largest, no_nan = x[0], True
    for j in range(x.size):
        no_nan &= x[j] == x[j]
        largest = x[j] if x[j] > largest else largest
    if not no_nan or largest - largest != 0:  # inf - inf is NaN
        return -1
    for j in range(x.size):
        if x[j] == largest:
            return j
    return -1
