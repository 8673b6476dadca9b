"""A program: the recorded instructions of a function of arrays, with their operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.program.native import Native
from xformer.backends.numba.program.traced import (
    Buffer,
    Shape,
    Traced,
    TracedNumber,
    Unrecorded,
    laid_out,
    number,
)
from xformer.backends.numba.tuning import WORTH

Operand = Any  # a `Traced`, or an array or a number whose value is known while recording
Run = Callable[..., None]
InPlace = Sequence[Sequence[int]]


class Instruction(NamedTuple):
    """An operation on arrays, in compiled code by `native`, or else as Python by `run`.

    native: all ins are then arrays.
    run: run(*outs, *ins) computes outs on NumPy arrays. None if there is always a `native`.
    Neither of the two reads the old values of outs, or writes to ins.
    in_place: for each out, the indices of ins whose memory it may reuse: to compute an element of
    the out, an instruction reads only the same element of these ins.
    raises: of an instruction that checks values, which is always run. It is called with the least
        and the largest value if a native check has failed. Without outs it only checks.
    """

    name: str
    outs: tuple[Traced, ...]
    ins: tuple[Operand, ...]
    native: Native | None = None
    run: Run | None = None
    in_place: InPlace = ()
    raises: Callable[[Any], None] | None = None

    def __str__(self) -> str:
        outs, ins = (" ".join(map(_shown, operands)) for operands in (self.outs, self.ins))
        return f"{self.name:<20} {outs or '-':<28} <- {ins}"


class Program:
    """A list of instructions in the order of their recording, and the program's inputs.

    threads: how many threads will run it; the number of pieces of an instruction depends on this.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.code: list[Instruction] = []
        self.inputs: list[Traced] = []
        # Python's operator, its operands and its result, for what is computed of numbers alone. A
        # check of a number has no result.
        self.formulas: list[tuple[Callable[..., Any], tuple[Any, ...], Traced | None]] = []

    def input(self, name: str, shape: Shape, dtype: Any, strides: Shape) -> Traced:
        """Declare an input: an array that the caller passes to each run."""
        itemsize = np.dtype(dtype).itemsize
        x = laid_out(self, Buffer(math.prod(shape) * itemsize, name), shape, dtype, strides)
        self.inputs.append(x)
        return x

    def number(self, name: str, dtype: Any) -> TracedNumber:
        """Declare an input that is a Python number."""
        x = number(self.input(name, (), dtype, ()))
        self.inputs[-1] = x
        return x

    def fresh(self, shape: Sequence[int], dtype: Any) -> Traced:
        """Return a new C-contiguous array for the output of an instruction."""
        shape, dtype = tuple(map(int, shape)), np.dtype(dtype)
        strides, step = list[int](), dtype.itemsize
        for n in reversed(shape):
            strides.append(step)
            step *= max(n, 1)
        buffer = Buffer(math.prod(shape) * dtype.itemsize)
        return laid_out(self, buffer, shape, dtype, tuple(reversed(strides)))

    def emit(
        self,
        name: str,
        outs: Sequence[Traced],
        ins: Sequence[Operand],
        native: Native | None = None,
        *,
        run: Run | None = None,
        in_place: InPlace = (),
        raises: Callable[[Any], None] | None = None,
    ) -> None:
        """Append an instruction (arguments as of `Instruction`), with constants as NumPy arrays."""
        ins = [x.layout if isinstance(x, Traced) and x.is_constant else x for x in ins]
        self.code.append(Instruction(name, tuple(outs), tuple(ins), native, run, in_place, raises))

    def pieces(self, size: int) -> int:
        """Return the number of pieces of an instruction of `size` elements: `threads` or 1.

        Work on up to `WORTH` elements is not divided.
        """
        return self.threads if size > WORTH else 1

    def needed(self, results: Sequence[Traced]) -> list[Instruction]:
        """Return the instructions that `results` depend on, and all checks (dead-code elimination).

        Instructions that have only empty outputs are dropped, too.
        """
        needed_buffers = {x.buffer for x in results}
        code = []
        for instruction in reversed(self.code):
            if instruction.outs and not any(out.size for out in instruction.outs):
                continue
            if instruction.raises or any(out.buffer in needed_buffers for out in instruction.outs):
                code.append(instruction)
                needed_buffers.update(x.buffer for x in instruction.ins if isinstance(x, Traced))
        return code[::-1]


def common_program(operands: Sequence[Operand]) -> Program | None:
    """Return the program that operations on these operands are recorded in.

    It is the program of the `Traced` operands; None if all operands are constants. Unrecorded for
    NumPy arrays, whose values could be others in the next run. ValueError for operands of two
    programs.
    """
    require_no_array(operands)
    traced = [x for x in operands if isinstance(x, Traced)]
    programs = {x.program for x in traced if x.program is not None}
    if len(programs) > 1:
        raise ValueError(
            "an operation has arrays of two programs: one array is from another recording"
        )
    return next(iter(programs), None)


def program_of(*operands: Operand) -> Program:
    """Return the program as `common_program`. Unrecorded if all operands are constants."""
    program = common_program(operands)
    if program is None:
        raise Unrecorded("a kernel gets constants only, as of an empty batch")
    return program


def require_no_array(operands: Sequence[Operand]) -> None:
    """Raise Unrecorded for a NumPy array: only arguments are inputs."""
    for x in operands:
        if isinstance(x, np.ndarray):
            raise Unrecorded(
                f"an array that is no argument is read, {x.dtype.name}{list(x.shape)}: pass it as "
                "an argument"
            )


def _shown(x: Operand) -> str:
    """Return an operand as a listing of the program shows it."""
    if isinstance(x, Traced):
        name = f"{x.buffer.name} " if x.buffer is not None and x.buffer.name else ""
        return f"{name}{x.dtype.name}{list(x.shape)}"
    if isinstance(x, np.ndarray) and x.ndim:
        return f"constant {x.dtype.name}{list(x.shape)}"
    return str(x)
