"""A program's code with addresses: what the engine reads, and arrays for what runs as Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.program.engine import ARGS, FIRST, execute
from xformer.backends.numba.program.plan import waits
from xformer.backends.numba.program.program import Instruction
from xformer.backends.numba.program.traced import Buffer, Traced, address


class _Place(NamedTuple):
    """Where an argument's address goes, in the memory of which buffer, and how far in it."""

    word: int
    buffer: Buffer
    offset: int


class Code:
    """Instructions, in runs of native ones and of others."""

    def __init__(self, code: Sequence[Instruction], spans: Any, threads: int) -> None:
        self.threads = threads
        self.runs = _runs(code)
        self._starts: list[int] = []
        self._constants: list[Any] = []  # whose addresses are in the words
        words: list[int] = []
        places: list[_Place] = []
        rows: list[tuple[int, ...]] = []
        for native, run in self.runs:
            first = 0
            for one, barrier in zip(run, waits(run, spans), strict=True) if native else ():
                assert one.native is not None
                kernel, numbers, pieces = one.native
                words.append(len(one.outs) + len(one.ins))  # before the first, for `numbers`
                self._starts.append(len(words))
                for x in (*one.outs, *one.ins):
                    if isinstance(x, Traced):
                        assert x.buffer is not None
                        places.append(_Place(len(words), x.buffer, x.offset))
                        words.append(0)
                    else:
                        self._constants.append(x)
                        words.append(address(x))
                words += [int(n) for n in numbers]
                rows.append((kernel.address, 0, pieces, barrier, first))
                first += pieces
        self._words = np.array(words, np.int64)
        self._rows = np.array(rows, np.int64).reshape(len(rows), FIRST + 1)
        self._where = np.array([place.word for place in places], np.int64)
        self._buffers = list(dict.fromkeys(place.buffer for place in places))
        number = {buffer: i for i, buffer in enumerate(self._buffers)}
        self._which = np.array([number[place.buffer] for place in places], np.int64)
        self._plus = np.array([place.offset for place in places], np.int64)

    def __call__(self, memory: dict[Buffer, Any]) -> None:
        """One run, with the memory of each buffer. Words are of this call: two may be under way."""
        begins = np.array([memory[b].ctypes.data for b in self._buffers], np.int64)
        words, rows = self._words.copy(), self._rows.copy()
        words[self._where] = begins[self._which] + self._plus
        rows[:, ARGS] = words.ctypes.data + 8 * np.array(self._starts, np.int64)
        done = 0
        for native, run in self.runs:
            if native:
                execute(rows[done : done + len(run)], words, self.threads)
                done += len(run)
            else:
                with np.errstate(all="ignore"):
                    for one in run:
                        one.run(*(array_of(x, memory) for x in (*one.outs, *one.ins)))


def _runs(code: Sequence[Instruction]) -> list[tuple[bool, list[Instruction]]]:
    """Neighbours that are native, and neighbours that are not."""
    runs: list[tuple[bool, list[Instruction]]] = []
    for one in code:
        native = one.native is not None
        if not runs or runs[-1][0] != native:
            runs.append((native, []))
        runs[-1][1].append(one)
    return runs


def array_of(x: Any, memory: dict[Buffer, Any]) -> Any:
    """An operand as an array of NumPy."""
    if not isinstance(x, Traced):
        return x
    if x.buffer is None:
        return x.layout
    if not x.size:
        return np.empty(x.shape, x.dtype)
    return np.ndarray(x.shape, x.dtype, memory[x.buffer], x.offset, x.strides)
