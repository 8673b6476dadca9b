"""The time of each instruction of a program, run one by one.

    print(xf.compile(step).timed(params, tokens))

Each instruction runs on all threads, with the data in their caches that the one before left there.
Its time is the least of all rounds. The sum is more than a run of the program takes, since threads
wait after each instruction.
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
    """The time of one instruction."""

    number: int  # index in the program, from 0
    instruction: Instruction
    waits: bool  # whether threads wait for all earlier instructions before it
    seconds: float

    def __str__(self) -> str:
        native, microseconds = self.instruction.native, 1e6 * self.seconds
        pieces = "Python" if native is None else f"{native.pieces}"
        mark = "waits" if self.waits else ""
        return f"{microseconds:>10.1f} {pieces:>7} {mark:<6}{self.number:>5}  {self.instruction}"


def timed(program: Recorded, arrays: Sequence[Any], rounds: int) -> list[Timed]:
    """Return the least time of each instruction in `rounds` rounds, in the program's order.

    arrays: inputs as of a run; donated ones are overwritten. ValueError if an array has another
    layout than recorded.
    """
    program.require_layouts(arrays)
    memory = program.memory(arrays)
    codes = [Code([x], program.plan.offsets, program.threads) for x in program.code]
    least = [np.inf] * len(codes)
    for _ in range(rounds):
        for i, code in enumerate(codes):
            start = time.perf_counter()
            code(memory)
            least[i] = min(least[i], time.perf_counter() - start)
    marks = _waits(program)
    return [Timed(i, x, marks[i], float(least[i])) for i, x in enumerate(program.code)]


def table(program: Recorded, arrays: Sequence[Any], rounds: int) -> str:
    """Return a text table of `timed`, the longest instruction first.

    Columns: microseconds, pieces, whether threads wait before it, index, its line of the listing.
    """
    times = timed(program, arrays, rounds)
    total = sum(x.seconds for x in times)
    head = f"{len(times)} instructions, one by one {1e3 * total:.3f} ms, {program.threads} threads"
    names = f"{'us':>10} {'pieces':>7} {'':<6}{'':>5}  instruction"
    lines = map(str, sorted(times, key=lambda x: -x.seconds))
    return "\n".join([head, names, *lines])


def _waits(program: Recorded) -> list[bool]:
    """Return for each instruction whether all earlier ones are done before it begins.

    This holds for every Python instruction and for the first one of each native group.
    """
    marks: list[bool] = []
    for native, group in program.groups:
        waiting = waits(group, program.plan.offsets) if native else [True] * len(group)
        marks += [True, *waiting[1:]]
    return marks
