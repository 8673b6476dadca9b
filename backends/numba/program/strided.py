"""Loops over strided arrays: neighbouring axes are merged, and the last axis is the inner loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

AXES = 4  # axes of a loop; the last is a row


class Loop(NamedTuple):
    """A loop over `AXES` axes. strides: of each operand in bytes, 0 along a broadcast axis.

    Leading axes that are not needed have size 1.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def loop_over(shape: Sequence[int], layouts: Sequence[Any]) -> Loop | None:
    """Return the loop over arrays that broadcast to `shape`; None if it needs more than AXES axes.

    layouts: NumPy arrays; the first one is the output.
    """
    strides = [np.broadcast_to(x, shape).strides for x in layouts]
    return _merged(shape, strides)


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Loop | None:
    """Return the loop with axes in the order of the first operand's strides, largest first.

    Neighbouring axes are merged if one stride per operand can step through both.
    """
    axes = [(n, [x[i] for x in strides]) for i, n in enumerate(shape) if n != 1]
    axes.sort(key=lambda axis: -abs(axis[1][0]))
    merged: list[tuple[int, list[int]]] = []
    for n, steps in axes:
        if merged and all(far == n * near for far, near in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = merged[-1][0] * n, steps
        else:
            merged.append((n, steps))
    if len(merged) > AXES:
        return None
    merged = [(1, [0] * len(strides))] * (AXES - len(merged)) + merged
    sizes = tuple(n for n, _ in merged)
    return Loop(sizes, tuple(tuple(steps[i] for _, steps in merged) for i in range(len(strides))))


def words_of(loop: Loop) -> tuple[int, ...]:
    """Return the sizes and then the strides of each operand, as integers of an instruction."""
    return (*loop.sizes, *(step for steps in loop.strides for step in steps))


def size_of(loop: Loop) -> int:
    """Return the number of elements that the loop visits."""
    return math.prod(loop.sizes)
