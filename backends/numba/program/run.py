"""A function of arrays, recorded for arrays of given layouts; to call it is a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from xformer.backends.numba import tile
from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.binding import (
    Code,
    Layout,
    Memory,
    addresses,
    array_of,
    far_to_near,
    layout_of,
)
from xformer.backends.numba.program.donate import are_alike, placed_in, require_apart, written_over
from xformer.backends.numba.program.plan import plan
from xformer.backends.numba.program.program import Instruction, Program
from xformer.backends.numba.program.traced import Traced
from xformer.backends.numpy.threads import scratch


class Recorded:
    """fn(*arrays) -> results, arrays all, for inputs of these layouts and so many threads.

    donated: which inputs a run may write over. A result of the layout of one is in its memory, and
    is that array; all other results are new, or, where `lends`, in the arena, which no other run
    uses while a result is still referenced; where it `shares`, a result may be a view of an input
    or of another result. numbers: which inputs stand for numbers of Python's.
    """

    def __init__(
        self,
        fn: Callable[..., Sequence[Any]],
        layouts: Sequence[Layout],
        threads: int = 1,
        donated: Collection[int] = (),
        numbers: Collection[int] = (),
        *,
        lends: bool = False,
        shares: bool = False,
    ) -> None:
        self.threads = threads
        program = Program(threads)
        inputs = [
            program.number(f"input {i}", layout[1])
            if i in numbers
            else program.input(f"input {i}", *layout)
            for i, layout in enumerate(layouts)
        ]
        self.layouts, self.donated = list(layouts), sorted(donated)
        self._order = sorted(range(len(layouts)), key=lambda i: i not in set(donated))
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in layouts]
        self._sizes = np.array([sizes[i] for i in self._order], np.int64)
        results = list(fn(*inputs))
        if not shares:
            results = _own(program, results, [inputs[i] for i in self.donated])
        code = program.needed([x for x in results if not x.is_constant])
        places = placed_in(results, [inputs[i] for i in self.donated])
        self._given = {i: self.donated[j] for i, j in places.items()}  # results that are inputs
        # Whether the first results are in the memory of all that is donated, in that order: then a
        # further run of the same arrays is one of what the last run has made.
        self.goes_round = [self._given.get(i) for i in range(len(donated))] == self.donated
        self.code = written_over(code, [(results[i], inputs[j]) for i, j in self._given.items()])
        self.results = results
        if shares:  # an input comes back as the array that it is
            self._given |= {
                i: j
                for i, x in enumerate(results)
                for j, y in enumerate(inputs)
                if x.buffer is y.buffer and x.offset == 0 and are_alike(x, y)
            }
        self._inputs = [x.buffer for x in inputs if x.buffer is not None]
        new = [x.buffer for i, x in enumerate(results) if i not in self._given]
        ends = [x for x in dict.fromkeys(new) if x is not None and x not in self._inputs]
        self._outputs = [] if lends else ends
        self.plan = plan(self.code, {*self._inputs, *self._outputs}, ends if lends else ())
        self._run = Code(self.code, self.plan.offsets, threads)

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results. ValueError for arrays of other layouts than it was recorded for."""
        own = [np.asarray(x) for x in arrays]  # a number of NumPy's has no place
        self.require_layouts(own)
        return self.run(own)

    def run(self, arrays: Sequence[Any], rounds: int = 1) -> list[Any]:
        """The results of arrays whose layouts were just read, and are those of the recording.

        rounds: runs, of which each further one reads what the last one has written over what is
        donated (`goes_round`); the results are those of the last one. ValueError where a check
        fails: what is donated may then have been written over.
        """
        memory = self.memory(arrays)
        self._run(memory, rounds)
        return [
            arrays[self._given[i]]
            if i in self._given
            else x.layout.copy()
            if x.is_constant
            else array_of(x, memory)
            for i, x in enumerate(self.results)
        ]

    def require_layouts(self, arrays: Sequence[Any]) -> None:
        """ValueError for arrays of other layouts than it was recorded for."""
        if [layout_of(x) for x in arrays] != self.layouts:
            raise ValueError("a program was given arrays of other layouts than it was recorded for")

    def memory(self, arrays: Sequence[Any]) -> Memory:
        """That of a run. ValueError where arrays that are donated lie in others."""
        if self.donated:
            begins = addresses([arrays[i] for i in self._order])
            require_apart(begins, self._sizes, len(self.donated))
        outputs = [np.empty(buffer.nbytes, np.uint8) for buffer in self._outputs]
        arena = scratch("arena", (self.plan.nbytes,), np.uint8)
        buffers = zip((*self._inputs, *self._outputs), (*arrays, *outputs), strict=True)
        return Memory(arena, self.plan.offsets, dict(buffers))

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of the memory that its threads keep for products."""
        return 4 * tile.SIZE * self.threads

    @property
    def runs(self) -> list[tuple[bool, list[Instruction]]]:
        """Neighbours that are native, and neighbours that are not."""
        return self._run.runs

    def explain(self) -> str:
        """How much there is to do, in how much memory, and what of it runs as Python, and why."""
        python = Counter(_without_kernel(one) for one in self.code if one.native is None)
        lines = [f"- {n} x {what}" for what, n in python.most_common()]
        head = (
            f"{len(self.code)} instructions, {self.threads} threads, {self.plan.nbytes:,} bytes of "
            f"arena; {python.total()} run as Python"
        )
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        head = f"{len(self.code)} instructions, {self.plan.nbytes:,} bytes"
        return "\n".join([head, *map(str, self.code)])


def _without_kernel(one: Instruction) -> str:
    """An instruction's name, and why it has no kernel."""
    dtypes = sorted({x.dtype.name for x in (*one.outs, *one.ins) if hasattr(x, "dtype")})
    if "float64" in dtypes:
        return f"{one.name}: in float64, kernels are for float32"
    return f"{one.name} of {', '.join(dtypes)}: there is no kernel"


def placed(x: Any, *, writeable: bool = False) -> Any:
    """x, or a copy where its elements do not fill a piece of memory, or lie unaligned.

    Also where it may not be written to, and is to be.
    """
    flags = x.flags
    filled = flags.c_contiguous or x.transpose(far_to_near(x)).flags.c_contiguous
    good = filled and flags.aligned and (flags.writeable or not writeable)
    return x if good else np.array(x, order="C")


def _own(program: Program, results: Sequence[Any], donated: Sequence[Traced]) -> list[Traced]:
    """Results that fill a buffer each, or constants; a donated input may come back as it is."""
    taken, kept = {x.buffer for x in program.inputs}, {x.buffer: x for x in donated}
    own = []
    for x in results:
        given = kept.pop(x.buffer, None)
        is_given = given is not None and x.offset == 0 and are_alike(x, given)
        if not x.is_constant and not is_given and (x.buffer in taken or not _fills(x)):
            x = namespace.copied(x)
        taken.add(x.buffer)
        own.append(x)
    return own


def _fills(x: Traced) -> bool:
    """Whether it is all of its buffer."""
    return x.offset == 0 and x.buffer is not None and x.size * x.dtype.itemsize == x.buffer.nbytes
