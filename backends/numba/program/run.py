"""Record a function of arrays as a program for inputs of fixed layouts, and run it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from xformer.backends.numba import tile
from xformer.backends.numba.program import operators  # noqa: F401  of `Traced` arrays
from xformer.backends.numba.program.binding import (
    Code,
    Layout,
    Memory,
    addresses,
    array_of,
    far_to_near,
    layout_of,
)
from xformer.backends.numba.program.copies import copied
from xformer.backends.numba.program.donate import are_alike, placed_in, require_apart, written_over
from xformer.backends.numba.program.plan import plan
from xformer.backends.numba.program.program import Instruction, Program
from xformer.backends.numba.program.traced import Traced, Unrecorded
from xformer.backends.numpy.threads import scratch
from xformer.dispatch import observed


class Recorded:
    """The program of fn(*arrays) -> a sequence of arrays; calling it runs the program.

    layouts: shape, dtype and strides of each input. threads: how many threads run the program.
    donated: indices of inputs that a run may overwrite. A result with the layout of a donated input
        is written into its memory; the run returns the donated array itself.
    numbers: indices of inputs that stand for Python numbers.
    lends: other results are views of the arena instead of new arrays. No other run uses that arena
        while a result is referenced.
    shares: a result may be a view of an input or of another result.
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
        self._donated_first = sorted(range(len(layouts)), key=lambda i: i not in set(donated))
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in layouts]
        self._sizes = np.array([sizes[i] for i in self._donated_first], np.int64)
        with observed(None):  # the arrays have no values
            results = list(fn(*inputs))
        if not shares:
            results = _separate(program, results, [inputs[i] for i in self.donated])
        code = program.needed([x for x in results if not x.is_constant])
        reused = placed_in(results, [inputs[i] for i in self.donated])
        # For a result that is returned as the array of an input: the index of that input.
        self._input_of = {i: self.donated[j] for i, j in reused.items()}
        # Whether the first results are written into the donated inputs, in their order. Then the
        # next round of a run reads the results of the round before.
        self.repeats_in_place = [self._input_of.get(i) for i in range(len(donated))] == self.donated
        self.code = written_over(code, [(results[i], inputs[j]) for i, j in self._input_of.items()])
        self.results, self._formulas = results, program.formulas
        self._numbers = [(i, inputs[i].buffer) for i in numbers]
        if shares:  # a result that is an input is returned as the input's array
            self._input_of |= {
                i: j
                for i, x in enumerate(results)
                for j, y in enumerate(inputs)
                if x.buffer is y.buffer and x.offset == 0 and are_alike(x, y)
            }
        self._inputs = [x.buffer for x in inputs if x.buffer is not None]
        new = [x.buffer for i, x in enumerate(results) if i not in self._input_of]
        outputs = [x for x in dict.fromkeys(new) if x is not None and x not in self._inputs]
        self._outputs = [] if lends else outputs  # buffers outside the arena
        self.plan = plan(self.code, {*self._inputs, *self._outputs}, outputs if lends else ())
        self._run = Code(self.code, self.plan.offsets, threads)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Return the results. ValueError if an array has another layout than recorded."""
        inputs = [np.asarray(x) for x in arrays]  # a NumPy scalar has no address
        self.require_layouts(inputs)
        return self.run(inputs)

    def run(self, arrays: Sequence[Any], rounds: int = 1) -> list[Any]:
        """Run the program `rounds` times and return the results of the last round.

        arrays: inputs in the recorded layouts, which are not checked here. After the first round
        donated inputs hold the results of the round before (`repeats_in_place`). ValueError if a
        check fails; donated arrays may have been overwritten then.
        """
        memory = self.memory(arrays)
        self._run(memory, rounds)
        return [
            arrays[self._input_of[i]]
            if i in self._input_of
            else x.layout.copy()
            if x.is_constant
            else array_of(x, memory)
            for i, x in enumerate(self.results)
        ]

    def require_layouts(self, arrays: Sequence[Any]) -> None:
        """Raise ValueError if an array has another layout than recorded."""
        if [layout_of(x) for x in arrays] != self.layouts:
            raise ValueError("a program got arrays of other layouts than it was recorded for")

    def require_numbers(self, arrays: Sequence[Any]) -> None:
        """Raise Unrecorded where Python computes another number than the program, or an error.

        Its ints have any size, its quotients by 0 are errors, and roots may be complex. Checks of
        numbers raise their own errors.
        """
        if not self._formulas:
            return
        values: dict[Any, Any] = {buffer: arrays[i].item() for i, buffer in self._numbers}
        for compute, operands, result in self._formulas:
            args = [values[x.buffer] if isinstance(x, Traced) else x for x in operands]
            value = compute(*args)
            if result is None:
                continue
            values[result.buffer] = value
            ints = [x for x in (value, *args) if type(x) is int]
            most = 2**63 - 1 if len(ints) > len(args) else 2**53  # as float64, or beside one
            if type(value) is not result.__class__ or any(abs(x) > most for x in ints):
                raise Unrecorded("numbers give one that int64 and float64 do not have")

    def memory(self, arrays: Sequence[Any]) -> Memory:
        """Return the memory of a run. ValueError if a donated array overlaps another array."""
        if self.donated:
            begins = addresses([arrays[i] for i in self._donated_first])
            require_apart(begins, self._sizes, len(self.donated))
        outputs = [np.empty(buffer.nbytes, np.uint8) for buffer in self._outputs]
        arena = scratch("arena", (self.plan.nbytes,), np.uint8)
        buffers = zip((*self._inputs, *self._outputs), (*arrays, *outputs), strict=True)
        return Memory(arena, self.plan.offsets, dict(buffers))

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch memory that the threads keep for matmuls."""
        return 4 * tile.SIZE * self.threads

    @property
    def groups(self) -> list[tuple[bool, list[Instruction]]]:
        """Groups of neighbouring instructions: (whether they are native, instructions)."""
        return self._run.groups

    def explain(self) -> str:
        """Return the number of instructions, the arena's size, and what runs as Python, and why."""
        python = Counter(_without_kernel(x) for x in self.code if x.native is None)
        lines = [f"- {n} x {reason}" for reason, n in python.most_common()]
        head = (
            f"{len(self.code)} instructions, {self.threads} threads, {self.plan.nbytes:,} bytes of "
            f"arena; {python.total()} run as Python"
        )
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        head = f"{len(self.code)} instructions, {self.plan.nbytes:,} bytes"
        return "\n".join([head, *map(str, self.code)])


def _without_kernel(instruction: Instruction) -> str:
    """Return the name of a Python instruction, and why it has no kernel."""
    operands = *instruction.outs, *instruction.ins
    dtypes = sorted({x.dtype.name for x in operands if hasattr(x, "dtype")})
    if "float64" in dtypes:
        return f"{instruction.name}: in float64, kernels are for float32"
    return f"{instruction.name} of {', '.join(dtypes)}: there is no kernel"


def gap_free(x: Any, *, writeable: bool = False) -> Any:
    """Return x, or a C-contiguous copy if x has gaps between its elements or is not aligned.

    writeable: also copy an array that is read-only.
    """
    flags = x.flags
    has_no_gaps = flags.c_contiguous or x.transpose(far_to_near(x)).flags.c_contiguous
    usable = has_no_gaps and flags.aligned and (flags.writeable or not writeable)
    return x if usable else np.array(x, order="C")


def _separate(program: Program, results: Sequence[Any], donated: Sequence[Traced]) -> list[Traced]:
    """Return the results, with copies of those that share memory or do not fill their buffer.

    A result that is a constant, or a whole donated input for the first time, is not copied.
    """
    used = {x.buffer for x in program.inputs}
    donated_by_buffer = {x.buffer: x for x in donated}
    separate = []
    for x in results:
        candidate = donated_by_buffer.pop(x.buffer, None)
        is_donated = candidate is not None and x.offset == 0 and are_alike(x, candidate)
        if not x.is_constant and not is_donated and (x.buffer in used or not _fills_buffer(x)):
            x = copied(x)
        used.add(x.buffer)
        separate.append(x)
    return separate


def _fills_buffer(x: Traced) -> bool:
    """Return whether x is all of its buffer."""
    return x.offset == 0 and x.buffer is not None and x.size * x.dtype.itemsize == x.buffer.nbytes
