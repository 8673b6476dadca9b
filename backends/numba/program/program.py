"""A program: the recorded instructions of a function of arrays, with what they read and write."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.program.native import Native
from xformer.backends.numba.program.traced import Buffer, Shape, Traced, laid_out
from xformer.backends.numba.tuning import WORTH

Operand = Any  # a `Traced`, or an array or a number that is known
Run = Callable[..., None]
Places = Sequence[Sequence[int]]


class Instruction(NamedTuple):
    """run(*outs, *ins) computes outs on arrays of NumPy; `native` computes the same without Python.

    Neither reads the old values of outs, nor writes to ins. A native one has only arrays as ins.
    """

    name: str
    run: Run
    outs: tuple[Traced, ...]
    ins: tuple[Operand, ...]
    native: Native | None = None
    in_place: Places = ()  # of each out, which ins it needs the same element of alone
    checks: bool = False  # it raises where a value is wrong, and is run though it has no outs

    def __str__(self) -> str:
        outs, ins = (" ".join(map(_shown, part)) for part in (self.outs, self.ins))
        return f"{self.name:<20} {outs or '-':<28} <- {ins}"


class Program:
    """Instructions in the order in which they were recorded, for a number of threads."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.code: list[Instruction] = []
        self.inputs: list[Traced] = []

    def input(self, name: str, shape: Shape, dtype: Any, strides: Shape) -> Traced:
        """Declare an input: an array that each run gets."""
        itemsize = np.dtype(dtype).itemsize
        given = laid_out(self, Buffer(math.prod(shape) * itemsize, name), shape, dtype, strides)
        self.inputs.append(given)
        return given

    def number(self, name: str, dtype: Any) -> Traced:
        """Declare an input that is a Python number."""
        given = self.input(name, (), dtype, ())
        given.is_number = True
        return given

    def fresh(self, shape: Sequence[int], dtype: Any) -> Traced:
        """A new array, C-contiguous, for an instruction to write."""
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
        run: Run,
        outs: Sequence[Traced],
        ins: Sequence[Operand],
        native: Native | None = None,
        *,
        in_place: Places = (),
        checks: bool = False,
    ) -> None:
        """Append an instruction. Operands that are constants are stored as arrays."""
        known = [x.layout if isinstance(x, Traced) and x.is_constant else x for x in ins]
        one = Instruction(name, run, tuple(outs), tuple(known), native, in_place, checks)
        self.code.append(one)

    def pieces(self, size: int) -> int:
        """The number of pieces of work: one a thread if `size` elements are worth it, else 1."""
        return self.threads if size > WORTH else 1

    def needed(self, results: Sequence[Traced]) -> list[Instruction]:
        """The instructions that `results` depend on, and those that check values.

        The others are dropped (dead-code elimination), as are those with only empty outputs.
        """
        wanted = {x.buffer for x in results}
        kept = []
        for one in reversed(self.code):
            if one.outs and not any(out.size for out in one.outs):
                continue  # it has nothing to compute
            if one.checks or any(out.buffer in wanted for out in one.outs):
                kept.append(one)
                wanted.update(x.buffer for x in one.ins if isinstance(x, Traced))
        return kept[::-1]


def of(operands: Sequence[Operand]) -> Program | None:
    """The program that records operations on these operands; None if all are constants."""
    found = {x.program for x in operands if isinstance(x, Traced) and x.program is not None}
    if len(found) > 1:
        raise ValueError("arrays of two programs meet: one of them was kept from another recording")
    return next(iter(found), None)


def _shown(x: Operand) -> str:
    if isinstance(x, Traced):
        name = f"{x.buffer.name} " if x.buffer is not None and x.buffer.name else ""
        return f"{name}{x.dtype.name}{list(x.shape)}"
    if isinstance(x, np.ndarray) and x.ndim:
        return f"constant {x.dtype.name}{list(x.shape)}"
    return str(x)
