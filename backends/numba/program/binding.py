"""Fill in the addresses of one run: the engine's list, and NumPy arrays for Python instructions."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.jit import rowwise
from xformer.backends.numba.program.engine import ANYONE, ARGS, CHECK, execute
from xformer.backends.numba.program.native import NOTHING
from xformer.backends.numba.program.native import words as words_at
from xformer.backends.numba.program.plan import waits
from xformer.backends.numba.program.program import Instruction
from xformer.backends.numba.program.traced import Buffer, Traced, address

Layout = tuple[tuple[int, ...], Any, tuple[int, ...]]  # shape, dtype, strides


class Memory(NamedTuple):
    """The memory of one run: the arena, offsets of buffers in it, arrays of all other buffers."""

    arena: Any
    offsets: dict[Buffer, int]
    arrays: dict[Buffer, Any]

    def of(self, buffer: Buffer) -> Any:
        """Return the bytes from the beginning of a buffer on."""
        offset = self.offsets.get(buffer)
        return _bytes(self.arrays[buffer]) if offset is None else self.arena[offset:]


class _Argument(NamedTuple):
    """An argument that is an address: `offset` bytes into a buffer.

    word: the index of the word that holds the address.
    """

    word: int
    buffer: Buffer
    offset: int


class _Check(NamedTuple):
    """A native check.

    group: the index of its group of instructions. word: the index of its first word (`NOTHING`).
    raises: called with the least and the largest value if the check has failed.
    """

    group: int
    word: int
    raises: Any


class Code:
    """The instructions of a program, ready to run: a call fills in addresses and executes them.

    code: the instructions. offsets: of buffers in the arena. threads: that run the code.
    self.groups lists groups of neighbouring native instructions, which the engine executes in one
    call, and of neighbouring Python instructions.
    """

    def __init__(
        self, code: Sequence[Instruction], offsets: dict[Buffer, int], threads: int
    ) -> None:
        self.threads = threads
        self.groups = _groups(code)
        self._blas = [
            native and any(x.native.blas for x in group)  # type: ignore[union-attr]
            for native, group in self.groups
        ]
        words, starts, checks = list[int](), list[int](), list[int]()
        arguments, constants = list[_Argument](), list[tuple[int, Any]]()
        self._checks = list[_Check]()
        rows: list[tuple[int, ...]] = []
        for i, (native, group) in enumerate(self.groups):
            first = 0
            for instruction, barrier in (
                zip(group, waits(group, offsets), strict=True) if native else ()
            ):
                assert instruction.native is not None
                kernel, numbers, pieces, _, anyone = instruction.native
                operands = *instruction.outs, *instruction.ins
                words.append(len(operands))  # `native.operands` reads it
                starts.append(len(words))
                for x in operands:
                    if isinstance(x, Traced):
                        assert x.buffer is not None
                        arguments.append(_Argument(len(words), x.buffer, x.offset))
                    else:
                        constants.append((len(words), np.asarray(x)))
                    words.append(0)
                checks.append(len(words) if instruction.raises else -1)
                if instruction.raises:
                    self._checks.append(_Check(i, len(words), instruction.raises))
                words += [int(n) for n in numbers]
                rows.append((kernel.address, 0, pieces, barrier, first, 0, anyone))
                first += pieces
        self._starts, self._check_words = 8 * np.array(starts, np.int64), np.array(checks, np.int64)
        self._words = np.array(words, np.int64)
        self._rows = np.array(rows, np.int64).reshape(len(rows), ANYONE + 1)
        # A call reads these addresses: buffers outside the arena, the arena, constants. The word
        # self._address_words[n] is address number self._sources[n] plus self._distances[n].
        self._buffers = [b for b in dict.fromkeys(x.buffer for x in arguments) if b not in offsets]
        source_of = {buffer: i for i, buffer in enumerate([*self._buffers, None])}  # None: arena
        sources = [source_of[None if x.buffer in offsets else x.buffer] for x in arguments]
        distances = [offsets.get(x.buffer, 0) + x.offset for x in arguments]
        unique = {id(x): x for _, x in constants}
        constant_source = {key: len(source_of) + i for i, key in enumerate(unique)}
        self._constants = list(unique.values())
        self._constant_layouts = [layout_of(x) for x in self._constants]
        address_words = [x.word for x in arguments] + [word for word, _ in constants]
        self._address_words = np.array(address_words, np.int64)
        sources += [constant_source[id(x)] for _, x in constants]
        self._sources = np.array(sources, np.int64)
        self._distances = np.array([*distances, *(0 for _ in constants)], np.int64)

    def __call__(self, memory: Memory, rounds: int = 1) -> None:
        """Run all instructions in this memory, `rounds` times. ValueError if a check fails.

        Words and rows are copied for each call, since two threads may call at the same time.
        """
        external = [memory.arrays[buffer] for buffer in self._buffers]
        if [layout_of(x) for x in self._constants] != self._constant_layouts:
            raise ValueError(
                "a constant of a program (an array that is no argument) has another layout than "
                "when the program was recorded"
            )
        sources = addresses([*external, memory.arena, *self._constants])
        words, rows = self._words.copy(), self._rows.copy()
        words[self._address_words] = sources[self._sources] + self._distances
        words_address = address(words)
        rows[:, ARGS] = words_address + self._starts
        checks = words_address + 8 * self._check_words
        rows[:, CHECK] = np.where(self._check_words < 0, 0, checks)
        if len(self.groups) == 1 and self.groups[0][0]:
            self._run_native(0, rows, words, rounds)
            return
        for _ in range(rounds):
            done = 0
            for i, (native, group) in enumerate(self.groups):
                if native:
                    self._run_native(i, rows[done : done + len(group)], words, 1)
                    done += len(group)
                else:
                    _run_python(group, memory)

    def _run_native(self, i: int, rows: Any, words: Any, rounds: int) -> None:
        """Execute group i, native instructions, `rounds` times; raise the error of a failed check.

        rows: the records of its instructions for `execute`, with addresses filled in
        words: the int64 words of the whole program: arguments of instructions, results of checks
        If several checks of the group failed, the first one in program order raises.
        """
        execute(rows, words, self.threads, rounds=rounds, blas=self._blas[i])
        for check in self._checks:
            failed, *span = words[check.word : check.word + len(NOTHING)]
            if check.group == i and failed:
                check.raises(np.array(span))


def _run_python(group: Sequence[Instruction], memory: Memory) -> None:
    """Run instructions by their functions on NumPy arrays."""
    with np.errstate(all="ignore"):
        for instruction in group:
            operands = *instruction.outs, *instruction.ins
            assert instruction.run is not None
            instruction.run(*(array_of(x, memory) for x in operands))


def addresses(arrays: Sequence[Any]) -> Any:
    """Return the address of the first element of each array, as an int64 array."""
    if not _READABLE or not all([isinstance(x, np.ndarray) for x in arrays]):
        return np.array([address(x) for x in arrays], np.int64)
    objects = np.fromiter(map(id, arrays), np.int64, len(arrays))
    return _data_pointers(objects, object.__basicsize__)


@rowwise
def _data_pointers(objects: Any, header_nbytes: int) -> Any:
    """Return the data pointers of NumPy arrays, read from memory.

    objects: the addresses of the array objects. header_nbytes: the size of a Python object's
    header, behind which the data pointer is stored (`PyArrayObject` of NumPy's C-API). NumPy's
    attributes would take a microsecond each.
    """
    pointers = np.empty(len(objects), np.int64)
    for i in range(len(objects)):
        pointers[i] = words_at(objects[i] + header_nbytes, 1)[0]
    return pointers


def _groups(code: Sequence[Instruction]) -> list[tuple[bool, list[Instruction]]]:
    """Return groups of neighbouring instructions: (whether they are native, instructions)."""
    groups: list[tuple[bool, list[Instruction]]] = []
    for instruction in code:
        native = instruction.native is not None
        if not groups or groups[-1][0] != native:
            groups.append((native, []))
        groups[-1][1].append(instruction)
    return groups


def array_of(x: Any, memory: Memory) -> Any:
    """Return an operand as a NumPy array (a number as it is)."""
    if not isinstance(x, Traced):
        return x
    if x.buffer is None:
        return x.layout
    if not x.size:
        return np.empty(x.shape, x.dtype)
    return np.ndarray(x.shape, x.dtype, memory.of(x.buffer), x.offset, x.strides)


def far_to_near(x: Any) -> list[int]:
    """Return the axes of x in the order of decreasing absolute strides."""
    return sorted(range(x.ndim), key=lambda i: -abs(x.strides[i]))


def _bytes(x: Any) -> Any:
    """Return the memory of an array without gaps as a uint8 vector, without a copy."""
    return x.transpose(far_to_near(x)).reshape(-1).view(np.uint8)


def layout_of(x: Any) -> Layout:
    """Return the shape, dtype and strides of an array."""
    return x.shape, x.dtype, x.strides


def _is_readable() -> bool:
    """Return whether `_data_pointers` is right with this Python and NumPy."""
    arrays = [np.ones(3), np.ones((2, 2), np.uint8)[:, 1:]]
    if platform.python_implementation() != "CPython" or np.intp(0).itemsize != 8:
        return False
    objects = np.array([id(x) for x in arrays], np.int64)
    pointers = _data_pointers(objects, object.__basicsize__)
    return pointers.tolist() == [address(x) for x in arrays]


_READABLE = _is_readable()
