"""A function of arrays, recorded for arrays of given layouts; to call it is a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.binding import Code, array_of
from xformer.backends.numba.program.donate import placed_in, require_apart, written_over
from xformer.backends.numba.program.plan import LINE, plan
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.traced import Traced

Layout = tuple[tuple[int, ...], Any, tuple[int, ...]]  # shape, dtype, strides


class Recorded:
    """fn(*arrays) -> results, arrays all, for inputs of these layouts and so many threads.

    donated: which inputs a run may write over. A result of the layout of one is in its memory, and
    is that array; all other results are new. numbers: which inputs stand for numbers of Python's.
    """

    def __init__(
        self,
        fn: Callable[..., Sequence[Any]],
        layouts: Sequence[Layout],
        threads: int = 1,
        donated: Collection[int] = (),
        numbers: Collection[int] = (),
    ) -> None:
        program = Program(threads)
        inputs = [
            program.number(f"input {i}", layout[1])
            if i in numbers
            else program.input(f"input {i}", *layout)
            for i, layout in enumerate(layouts)
        ]
        results = _own(program, fn(*inputs))
        code = program.needed([x for x in results if not x.is_constant])
        self.layouts, self.donated = list(layouts), sorted(donated)
        places = placed_in(results, [inputs[i] for i in self.donated])
        self._given = {i: self.donated[j] for i, j in places.items()}  # results that are inputs
        self.code = written_over(code, [(results[i], inputs[j]) for i, j in self._given.items()])
        self.results = results
        self._inputs = [x.buffer for x in inputs if x.buffer is not None]
        new = [x for i, x in enumerate(results) if i not in self._given]
        self._outputs = [x.buffer for x in new if x.buffer is not None]
        self.plan = plan(self.code, {*self._inputs, *self._outputs})
        self._run = Code(self.code, self.plan.offsets, threads)
        self._idle: list[_Arena] = []  # a call has one for itself

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results. The arrays have the layouts of the recording (`layout_of`)."""
        if [layout_of(x) for x in arrays] != self.layouts:
            raise ValueError("a program was given arrays of other layouts than it was recorded for")
        if self.donated:
            mine = [arrays[i] for i in self.donated]
            require_apart(mine, [x for i, x in enumerate(arrays) if i not in set(self.donated)])
        outputs = [np.empty(buffer.nbytes, np.uint8) for buffer in self._outputs]
        try:
            arena = self._idle.pop()
        except IndexError:
            arena = _Arena(self.plan.nbytes)
        memory = dict(zip(self._outputs, outputs, strict=True))
        memory |= {b: _bytes(x) for b, x in zip(self._inputs, arrays, strict=True)}
        memory |= {b: arena.memory[at:] for b, at in self.plan.offsets.items()}
        self._run(memory)
        self._idle.append(arena)
        return [
            arrays[self._given[i]]
            if i in self._given
            else x.layout.copy()
            if x.is_constant
            else array_of(x, memory)
            for i, x in enumerate(self.results)
        ]

    def __str__(self) -> str:
        head = f"{len(self.code)} instructions, {self.plan.nbytes:,} bytes"
        return "\n".join([head, *map(str, self.code)])


class _Arena:
    """Memory of one run, which begins with a line."""

    def __init__(self, nbytes: int) -> None:
        raw = np.empty(nbytes + LINE, np.uint8)
        self.memory = raw[-raw.ctypes.data % LINE :]


def placed(x: Any, *, writeable: bool = False) -> Any:
    """x, or a copy where its elements do not fill a piece of memory, or lie unaligned.

    Also where it may not be written to, and is to be.
    """
    filled = x.transpose(_order(x)).flags.c_contiguous and x.flags.aligned
    return x if filled and (x.flags.writeable or not writeable) else np.array(x, order="C")


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


def _order(x: Any) -> list[int]:
    """Its axes, from far to near."""
    return sorted(range(x.ndim), key=lambda i: -abs(x.strides[i]))


def _bytes(x: Any) -> Any:
    """The memory that an array fills."""
    return x.transpose(_order(x)).reshape(-1).view(np.uint8)
