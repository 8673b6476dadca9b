"""Functions of arrays as programs: recorded at the first call of each kind, then run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.binding import Code, array_of
from xformer.backends.numba.program.plan import LINE, plan
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.traced import Traced

Layout = tuple[tuple[int, ...], Any, tuple[int, ...]]  # shape, dtype, strides


class Recorded:
    """A function of arrays that was recorded; to call it with others of these layouts is a run.

    fn(*arrays) -> results, both lists. Results are new arrays at each call.
    """

    def __init__(
        self, fn: Callable[..., Sequence[Any]], layouts: Sequence[Layout], threads: int = 1
    ) -> None:
        program = Program(threads)
        inputs = [program.input(f"input {i}", *layout) for i, layout in enumerate(layouts)]
        self.layouts = list(layouts)
        self.results = _own(program, fn(*inputs))
        self.code = program.needed([x for x in self.results if not x.is_constant])
        self._inputs = [x.buffer for x in inputs if x.buffer is not None]
        self._outputs = [x.buffer for x in self.results if x.buffer is not None]
        self.plan = plan(self.code, {*self._inputs, *self._outputs})
        self._run = Code(self.code, self.plan.offsets, threads)
        self._idle: list[_Arena] = []  # a call has one for itself

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results. The arrays have the layouts of the recording (`layout_of`)."""
        given = [placed(x) for x in arrays]
        if [layout_of(x) for x in given] != self.layouts:
            raise ValueError("a program was given arrays of other layouts than it was recorded for")
        outputs = [np.empty(buffer.nbytes, np.uint8) for buffer in self._outputs]
        try:
            arena = self._idle.pop()
        except IndexError:
            arena = _Arena(self.plan.nbytes)
        memory = dict(zip(self._outputs, outputs, strict=True))
        memory |= {b: _bytes(x) for b, x in zip(self._inputs, given, strict=True)}
        memory |= {b: arena.memory[at:] for b, at in self.plan.offsets.items()}
        self._run(memory)
        self._idle.append(arena)
        return [array_of(x, memory) if x.buffer else x.layout.copy() for x in self.results]

    def __str__(self) -> str:
        head = f"{len(self.code)} instructions, {self.plan.nbytes:,} bytes"
        return "\n".join([head, *map(str, self.code)])


class _Arena:
    """Memory of one run, which begins with a line."""

    def __init__(self, nbytes: int) -> None:
        raw = np.empty(nbytes + LINE, np.uint8)
        self.memory = raw[-raw.ctypes.data % LINE :]


def placed(x: Any) -> Any:
    """x, or a copy where its elements do not fill a piece of memory, or lie unaligned."""
    order = sorted(range(x.ndim), key=lambda i: -abs(x.strides[i]))
    filled = x.transpose(order)
    return x if filled.flags.c_contiguous and x.flags.aligned else np.array(x, order="C")


def layout_of(x: Any) -> Layout:
    """What a program is recorded for."""
    return x.shape, x.dtype, x.strides


def _own(program: Program, results: Sequence[Any]) -> list[Traced]:
    """Results that fill a buffer each, or constants."""
    taken = {x.buffer for x in program.inputs}
    own = []
    for x in results:
        if not x.is_constant and (x.buffer in taken or not _fills(x)):
            x = namespace.copied(x)
        taken.add(x.buffer)
        own.append(x)
    return own


def _fills(x: Traced) -> bool:
    """Whether it is all of its buffer."""
    return x.offset == 0 and x.buffer is not None and x.size * x.dtype.itemsize == x.buffer.nbytes


def _bytes(x: Any) -> Any:
    """The memory that an array fills."""
    order = sorted(range(x.ndim), key=lambda i: -abs(x.strides[i]))
    return x.transpose(order).reshape(-1).view(np.uint8)
