"""A program's code with addresses: what the engine reads, and arrays for what runs as Python."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.program.engine import ANYONE, ARGS, CHECK, execute
from xformer.backends.numba.program.native import NOTHING
from xformer.backends.numba.program.native import words as words_at
from xformer.backends.numba.program.plan import waits
from xformer.backends.numba.program.program import Instruction
from xformer.backends.numba.program.traced import Buffer, Traced, address

Layout = tuple[tuple[int, ...], Any, tuple[int, ...]]  # shape, dtype, strides


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


class _Check(NamedTuple):
    """A native check: the number of its run, where its words are, what raises its error."""

    run: int
    word: int
    raises: Any


class Code:
    """Instructions, in runs of native ones and of others."""

    def __init__(
        self, code: Sequence[Instruction], offsets: dict[Buffer, int], threads: int
    ) -> None:
        self.threads = threads
        self.runs = _runs(code)
        self._blas = [native and any(one.native.blas for one in run) for native, run in self.runs]  # type: ignore[union-attr]
        words, starts, checks = list[int](), list[int](), list[int]()
        places, constants = list[_Place](), list[tuple[int, Any]]()
        self._checks = list[_Check]()
        rows: list[tuple[int, ...]] = []
        for i, (native, run) in enumerate(self.runs):
            first = 0
            for one, barrier in zip(run, waits(run, offsets), strict=True) if native else ():
                assert one.native is not None
                kernel, numbers, pieces, _, anyone = one.native
                words.append(len(one.outs) + len(one.ins))  # before the first, for `numbers`
                starts.append(len(words))
                for x in (*one.outs, *one.ins):
                    if isinstance(x, Traced):
                        assert x.buffer is not None
                        places.append(_Place(len(words), x.buffer, x.offset))
                    else:
                        constants.append((len(words), np.asarray(x)))  # a number has no place
                    words.append(0)
                checks.append(len(words) if one.checks else -1)
                if one.checks:
                    self._checks.append(_Check(i, len(words), one.run))
                words += [int(n) for n in numbers]
                rows.append((kernel.address, 0, pieces, barrier, first, 0, anyone))
                first += pieces
        self._starts, self._looks = 8 * np.array(starts, np.int64), np.array(checks, np.int64)
        self._words = np.array(words, np.int64)
        self._rows = np.array(rows, np.int64).reshape(len(rows), ANYONE + 1)
        self._buffers = [b for b in dict.fromkeys(p.buffer for p in places) if b not in offsets]
        number = {buffer: i for i, buffer in enumerate([*self._buffers, None])}  # None: the arena
        which = [None if place.buffer in offsets else place.buffer for place in places]
        plus = [offsets.get(place.buffer, 0) + place.offset for place in places]
        own = {id(x): x for _, x in constants}  # whose addresses are in the words, too
        order = {name: len(number) + i for i, name in enumerate(own)}
        self._constants, self._kept = list(own.values()), [layout_of(x) for x in own.values()]
        at = [place.word for place in places] + [word for word, _ in constants]
        self._where = np.array(at, np.int64)
        which_of = [number[buffer] for buffer in which] + [order[id(x)] for _, x in constants]
        self._which = np.array(which_of, np.int64)
        self._plus = np.array([*plus, *(0 for _ in constants)], np.int64)

    def __call__(self, memory: Memory, rounds: int = 1) -> None:
        """One run in this memory, or some rounds of it. ValueError where a check fails.

        Words are of this call: two may be under way.
        """
        apart = [memory.arrays[buffer] for buffer in self._buffers]
        if [layout_of(x) for x in self._constants] != self._kept:
            raise ValueError("an array that a program took from elsewhere has another layout now")
        begins = addresses([*apart, memory.arena, *self._constants])
        words, rows = self._words.copy(), self._rows.copy()
        words[self._where] = begins[self._which] + self._plus
        at = address(words)
        rows[:, ARGS] = at + self._starts
        rows[:, CHECK] = np.where(self._looks < 0, 0, at + 8 * self._looks)
        if len(self.runs) == 1 and self.runs[0][0]:
            self._native(0, rows, words, rounds)
            return
        for _ in range(rounds):
            done = 0
            for i, (native, run) in enumerate(self.runs):
                if native:
                    self._native(i, rows[done : done + len(run)], words, 1)
                    done += len(run)
                else:
                    _by_python(run, memory)

    def _native(self, i: int, rows: Any, words: Any, rounds: int) -> None:
        """Run i of `runs`, some times, and its checks."""
        execute(rows, words, self.threads, rounds=rounds, blas=self._blas[i])
        for check in self._checks:
            failed, *span = words[check.word : check.word + len(NOTHING)]
            if check.run == i and failed:
                check.raises(np.array(span))


def _by_python(run: Sequence[Instruction], memory: Memory) -> None:
    with np.errstate(all="ignore"):
        for one in run:
            one.run(*(array_of(x, memory) for x in (*one.outs, *one.ins)))


def addresses(arrays: Sequence[Any]) -> Any:
    """Of each array that of its first element, int64."""
    if not _READABLE or not all([isinstance(x, np.ndarray) for x in arrays]):
        return np.array([address(x) for x in arrays], np.int64)
    heads = np.fromiter(map(id, arrays), np.int64, len(arrays))
    return _data_of(heads, object.__basicsize__)


@rowwise
def _data_of(heads: Any, behind: int) -> Any:
    """Behind the head of any object of Python's an array of NumPy's has this address.

    (`PyArrayObject` of NumPy's C-API; NumPy's own attributes take a microsecond each.)
    """
    found = np.empty(len(heads), np.int64)
    for i in range(len(heads)):
        found[i] = words_at(heads[i] + behind, 1)[0]
    return found


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


def layout_of(x: Any) -> Layout:
    """What a program is recorded for."""
    return x.shape, x.dtype, x.strides


def _is_readable() -> bool:
    """Whether arrays are laid out as `_data_of` reads them, in this Python and NumPy."""
    some = [np.ones(3), np.ones((2, 2), np.uint8)[:, 1:]]
    if platform.python_implementation() != "CPython" or np.intp(0).itemsize != 8:
        return False
    heads = np.array([id(x) for x in some], np.int64)
    return _data_of(heads, object.__basicsize__).tolist() == [address(x) for x in some]


_READABLE = _is_readable()
