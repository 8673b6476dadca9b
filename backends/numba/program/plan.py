"""Where the buffers of a program lie in one arena: those that live at one time lie apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xformer.backends.numba.program.program import Instruction
from xformer.backends.numba.program.traced import Buffer, Traced

Span = tuple[Buffer | None, int, int]  # None: the arena; first byte, and the one after the last

LINE = 64  # bytes: a buffer begins with a line of memory


class Plan(NamedTuple):
    """offsets: bytes from the beginning of the arena."""

    offsets: dict[Buffer, int]
    nbytes: int


def plan(
    code: Sequence[Instruction], elsewhere: set[Buffer], results: Sequence[Buffer] = ()
) -> Plan:
    """Of the buffers of a program but those that lie elsewhere. results: which are read after it.

    Inputs lie elsewhere, and so may results.
    """
    lives = _lives(code, elsewhere)
    lives |= {buffer: (lives[buffer][0], len(code)) for buffer in results if buffer in lives}
    order = sorted(lives, key=lambda buffer: -buffer.nbytes)
    first = np.array([lives[buffer][0] for buffer in order], np.int64)
    last = np.array([lives[buffer][1] for buffer in order], np.int64)
    sizes = np.array([-(-max(buffer.nbytes, 1) // LINE) * LINE for buffer in order], np.int64)
    begins = np.zeros(len(order), np.int64)
    for i in range(len(order)):
        near = np.flatnonzero((first[:i] <= last[i]) & (last[:i] >= first[i]))
        begins[i] = _lowest(begins[near], begins[near] + sizes[near], int(sizes[i]))
    nbytes = int((begins + sizes).max(initial=0))
    return Plan(dict(zip(order, begins.tolist(), strict=True)), nbytes)


def _lives(code: Sequence[Instruction], elsewhere: set[Buffer]) -> dict[Buffer, tuple[int, int]]:
    """The first and the last instruction that each buffer is an operand of."""
    lives: dict[Buffer, tuple[int, int]] = {}
    for i, one in enumerate(code):
        for x in (*one.outs, *one.ins):
            buffer = x.buffer if isinstance(x, Traced) else None
            if buffer is not None and buffer not in elsewhere:
                lives[buffer] = lives.get(buffer, (i, i))[0], i
    return lives


def _lowest(begins: np.ndarray, ends: np.ndarray, size: int) -> int:
    """The lowest place for so many bytes between those that are taken."""
    at = 0
    for i in np.argsort(begins, kind="stable"):
        if at + size <= begins[i]:
            break
        at = max(at, int(ends[i]))
    return at


def waits(run: Sequence[Instruction], offsets: dict[Buffer, int]) -> list[bool]:
    """Of neighbours, which ones need all that came before: they touch what it has written.

    Or they write what it has read or written, maybe by another buffer in the same place. All that
    comes after a check waits for it: no kernel sees an id that is none.
    """
    read, written, marks, checked = list[Span](), list[Span](), list[bool](), False
    for one in run:
        ins = [_span(x, offsets) for x in one.ins if isinstance(x, Traced) and x.size]
        outs = [_span(x, offsets) for x in one.outs if x.size]
        marks.append(checked or _meet(written, ins + outs) or _meet(read, outs))
        checked = one.checks
        if marks[-1]:
            read, written = [], []
        read += ins
        written += outs
    return marks


def _span(x: Traced, offsets: dict[Buffer, int]) -> Span:
    """Its bytes: in the arena, or in a buffer elsewhere."""
    assert x.buffer is not None
    reach = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    begin = x.offset + sum(step for step in reach if step < 0)
    end = x.offset + sum(step for step in reach if step > 0) + x.dtype.itemsize
    at = offsets.get(x.buffer)
    return (x.buffer, begin, end) if at is None else (None, at + begin, at + end)


def _meet(some: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(
        a[0] is b[0] and a[1] < b[2] and b[1] < a[2] for a, b in itertools.product(some, others)
    )
