"""What each instruction of a program takes, run one by one.

    print(xf.compile(step).timed(params, tokens))

An instruction has all threads, and what the one before has left in their caches. A line is the
least of the rounds; the sum is more than the program takes, since each waits for its threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.program.binding import Code
from xformer.backends.numba.program.plan import waits
from xformer.backends.numba.program.program import Instruction
from xformer.backends.numba.program.run import Recorded


class Timed(NamedTuple):
    """An instruction, whether threads wait before it, and what it takes."""

    number: int  # of the program's instructions, from 0
    one: Instruction
    waits: bool
    seconds: float

    def __str__(self) -> str:
        pieces = "Python" if self.one.native is None else f"{self.one.native.pieces}"
        mark = "waits" if self.waits else ""
        return f"{1e6 * self.seconds:>10.1f} {pieces:>7} {mark:<6}{self.number:>5}  {self.one}"


def timed(program: Recorded, arrays: Sequence[Any], rounds: int) -> list[Timed]:
    """Of each instruction, in order. arrays: as of a run; those that are donated are written over.

    ValueError for arrays of other layouts.
    """
    program.require_layouts(arrays)
    memory = program.memory(arrays)
    codes = [Code([one], program.plan.offsets, program.threads) for one in program.code]
    least = [np.inf] * len(codes)
    for _ in range(rounds):
        for i, code in enumerate(codes):
            begun = time.perf_counter()
            code(memory)
            least[i] = min(least[i], time.perf_counter() - begun)
    marks = _waits(program)
    return [Timed(i, one, marks[i], float(least[i])) for i, one in enumerate(program.code)]


def table(program: Recorded, arrays: Sequence[Any], rounds: int) -> str:
    """A line an instruction, the longest first: microseconds, pieces, whether threads wait."""
    found = timed(program, arrays, rounds)
    total = sum(one.seconds for one in found)
    head = f"{len(found)} instructions, one by one {1e3 * total:.3f} ms, {program.threads} threads"
    names = f"{'us':>10} {'pieces':>7} {'':<6}{'':>5}  instruction"
    lines = map(str, sorted(found, key=lambda one: -one.seconds))
    return "\n".join([head, names, *lines])


def _waits(program: Recorded) -> list[bool]:
    """Of each instruction whether all that came before is done first; always so around Python."""
    marks: list[bool] = []
    for native, run in program.runs:
        found = waits(run, program.plan.offsets) if native else [True] * len(run)
        marks += [True, *found[1:]]
    return marks
