"""`greedy`: the id of the largest logit of each row."""

from __future__ import annotations

from typing import Any

from xformer.backends.numba.jit import elementwise
from xformer.backends.numba.kernels.layout import record, recorded
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.program import program_of
from xformer.base.typing import Array
from xformer.ops.greedy import greedy as op


def _refuses(logits: Array) -> str | None:
    fits = logits.ndim == 2 and 0 not in logits.shape
    return None if fits else "logits are not (B, V) with B, V > 0"


@recorded(op, _refuses)
def greedy(logits: Array) -> Array:
    """Return the id (B,) of the largest logit of each row of `logits` (B, V), the first of equals.

    The id is -1 if a logit is NaN or the largest logit is not finite.
    """
    pieces = program_of(logits).threads if len(logits) > 1 else 1
    return record(largest_of_rows, "greedy", logits, pieces=pieces)[0]


@declared("chosen (B) int64 <- logits (B, V)")
def largest_of_rows(chosen: Any, logits: Any) -> None:
    """Find the largest logit of each row."""
    for i in range(len(logits)):
        chosen[i] = _first_largest(logits[i])


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
