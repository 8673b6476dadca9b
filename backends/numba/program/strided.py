"""Loops over arrays of any strides: axes are joined, and the last one goes in rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

AXES = 4  # of a loop, with its rows


class Loop(NamedTuple):
    """Sizes, and the strides of each operand, in `AXES` axes: the first may be of one element."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def loop(shape: Sequence[int], layouts: Sequence[Any]) -> Loop | None:
    """That over arrays which broadcast to a shape; None where it takes more axes."""
    strides = [np.broadcast_to(x, shape).strides for x in layouts]
    return joined(shape, strides)


def joined(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Loop | None:
    """Neighbouring axes are one where each operand goes through them evenly.

    The axis in which the first operand is densest comes last.
    """
    axes = [
        (n, [own[i] for own in strides]) for i, n in enumerate(shape) if n != 1
    ]  # as they stand, which is mostly from far to near
    axes.sort(key=lambda axis: -abs(axis[1][0]))
    done: list[tuple[int, list[int]]] = []
    for n, steps in axes:
        if done and all(far == n * near for far, near in zip(done[-1][1], steps, strict=True)):
            done[-1] = done[-1][0] * n, steps
        else:
            done.append((n, steps))
    if len(done) > AXES:
        return None
    done = [(1, [0] * len(strides))] * (AXES - len(done)) + done
    sizes = tuple(n for n, _ in done)
    return Loop(sizes, tuple(tuple(steps[i] for _, steps in done) for i in range(len(strides))))


def words_of(own: Loop) -> tuple[int, ...]:
    """A loop as an instruction's numbers."""
    return (*own.sizes, *(step for steps in own.strides for step in steps))


def size_of(own: Loop) -> int:
    """How many elements it goes through."""
    return math.prod(own.sizes)
