"""A program's code with addresses: what the engine reads, and arrays for what runs as Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.program.engine import ARGS, FIRST, execute
from xformer.backends.numba.program.plan import waits
from xformer.backends.numba.program.program import Instruction
from xformer.backends.numba.program.traced import Buffer, Traced, address


class Memory(NamedTuple):
    """Where the buffers of one run are: in its arena, or in arrays that fill them."""

    arena: Any
    offsets: dict[Buffer, int]
    arrays: dict[Buffer, Any]

    def of(self, buffer: Buffer) -> Any:
        """The bytes from the beginning of a buffer."""
        at = self.offsets.get(buffer)
        return _bytes(self.arrays[buffer]) if at is None else self.arena[at:]


class _Place(NamedTuple):
    """Where an argument's address goes, in the memory of which buffer, and how far in it."""

    word: int
    buffer: Buffer
    offset: int


class Code:
    """Instructions, in runs of native ones and of others."""

    def __init__(
        self, code: Sequence[Instruction], offsets: dict[Buffer, int], threads: int
    ) -> None:
        self.threads = threads
        self.runs = _runs(code)
        self._constants: list[Any] = []  # whose addresses are in the words
        words, starts = list[int](), list[int]()
        places: list[_Place] = []
        rows: list[tuple[int, ...]] = []
        for native, run in self.runs:
            first = 0
            for one, barrier in zip(run, waits(run, offsets), strict=True) if native else ():
                assert one.native is not None
                kernel, numbers, pieces = one.native
                words.append(len(one.outs) + len(one.ins))  # before the first, for `numbers`
                starts.append(len(words))
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
        self._starts = 8 * np.array(starts, np.int64)
        self._words = np.array(words, np.int64)
        self._rows = np.array(rows, np.int64).reshape(len(rows), FIRST + 1)
        self._where = np.array([place.word for place in places], np.int64)
        self._buffers = [b for b in dict.fromkeys(p.buffer for p in places) if b not in offsets]
        number = {buffer: i for i, buffer in enumerate([*self._buffers, None])}  # None: the arena
        which = [None if place.buffer in offsets else place.buffer for place in places]
        self._which = np.array([number[buffer] for buffer in which], np.int64)
        plus = [offsets.get(place.buffer, 0) + place.offset for place in places]
        self._plus = np.array(plus, np.int64)

    def __call__(self, memory: Memory) -> None:
        """One run in this memory. Words are of this call: two may be under way."""
        apart = [memory.arrays[buffer] for buffer in self._buffers]
        begins = np.array([address(x) for x in (*apart, memory.arena)], np.int64)
        words, rows = self._words.copy(), self._rows.copy()
        words[self._where] = begins[self._which] + self._plus
        rows[:, ARGS] = address(words) + self._starts
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


def array_of(x: Any, memory: Memory) -> Any:
    """An operand as an array of NumPy."""
    if not isinstance(x, Traced):
        return x
    if x.buffer is None:
        return x.layout
    if not x.size:
        return np.empty(x.shape, x.dtype)
    return np.ndarray(x.shape, x.dtype, memory.of(x.buffer), x.offset, x.strides)


def far_to_near(x: Any) -> list[int]:
    """Its axes, the one with the largest steps first."""
    return sorted(range(x.ndim), key=lambda i: -abs(x.strides[i]))


def _bytes(x: Any) -> Any:
    """The memory that an array fills."""
    return x.transpose(far_to_near(x)).reshape(-1).view(np.uint8)
