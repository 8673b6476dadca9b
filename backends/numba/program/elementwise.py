"""Elementwise functions in float32 and float64, over strided arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.atomic import array_like
from xformer.backends.numba.jit import elementwise
from xformer.backends.numba.program.formulas import OF_REALS, loops_of
from xformer.backends.numba.program.native import (
    Native,
    native,
    numbers,
    operands,
    part,
    words,
)
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.strided import AXES, loop_over, size_of, words_of
from xformer.backends.numba.program.traced import Traced

CODES = {name: code for code, name in enumerate(OF_REALS)}
LINE, BLOCK = 16, 1024  # elements: of a cache line; that are computed at once
NUMBERS = 1 + 4 * AXES  # words of `spec`: code of the function, sizes, strides of y, x1, x2
_loops = loops_of(OF_REALS)


def find_native(
    program: Program, name: str, out: Traced, ins: Sequence[Any]
) -> tuple[Native, list[Any]] | None:
    """Return the native form of the function `name`, and ins as arrays; None without a kernel."""
    code, dtype = CODES.get(name), out.dtype
    # A copy of another dtype moves words of the same size.
    copies = name == "copy" and ins[0].dtype == dtype and dtype.itemsize in (4, 8)
    if code is None or not out.size or not (copies or dtype in (np.float32, np.float64)):
        return None
    arrays = [
        x if isinstance(x, Traced) else np.asarray(x, getattr(x, "dtype", dtype)) for x in ins
    ]
    layouts = [x.layout if isinstance(x, Traced) else x for x in (out, *arrays)]
    if any(x.dtype != dtype for x in layouts):
        return None
    loop = loop_over(out.shape, (*layouts, layouts[-1])[:3])
    if loop is None:
        return None
    kernel = of_float32 if dtype.itemsize == 4 else of_float64
    return Native(kernel, (code, *words_of(loop)), program.pieces(size_of(loop))), arrays


@native
def of_float32(args: int, piece: int, pieces: int, memory: int) -> None:
    """y = f(x1) or f(x1, x2). outputs: y; inputs: x1, or x1 and x2; integers: spec (`NUMBERS`)."""
    _compute(args, piece, pieces, np.empty((2, BLOCK), np.float32))


@native
def of_float64(args: int, piece: int, pieces: int, memory: int) -> None:
    """As `of_float32`."""
    _compute(args, piece, pieces, np.empty((2, BLOCK), np.float64))


@elementwise
def _compute(args: int, piece: int, pieces: int, block: Any) -> None:
    """Compute a piece (see `cut`) in the dtype of `block` (2, BLOCK), which is scratch memory."""
    n_ins, spec = operands(args) - 1, numbers(args, NUMBERS)
    a = words(args, 1 + n_ins)
    y, x1, x2 = a[0], a[1], a[n_ins]
    (start, stop, low, high), size = cut(spec[1:5], piece, pieces), block.itemsize
    for i in range(start, stop):
        at, at1, at2 = y + row(spec, 5, i), x1 + row(spec, 9, i), x2 + row(spec, 13, i)
        for first in range(low, high, BLOCK):
            n = min(BLOCK, high - first)
            in1 = _read(at1 + first * spec[12], spec[12], n, block[0])
            in2 = _read(at2 + first * spec[16], spec[16], n, block[1])
            if spec[8] == size:
                _loops(spec[0], array_like(block, at + first * size, (n,)), in1, in2)
            else:
                _loops(spec[0], block[0, :n], in1, in2)
                for j in range(n):
                    array_like(block, at + (first + j) * spec[8], (1,))[0] = block[0, j]


@elementwise
def cut(sizes: Any, piece: int, pieces: int) -> Any:
    """Return (start, stop, low, high): a piece computes columns low to high of rows start to stop.

    Rows are divided among the pieces. With fewer rows than pieces, columns are divided instead.

    sizes: (4,), the sizes of the loop's axes. The first three axes together are the rows: their
        number is the product of the three sizes. The last axis has the columns.
    """
    n_rows, width = sizes[0] * sizes[1] * sizes[2], sizes[3]
    if n_rows >= pieces:
        start, stop = part(n_rows, piece, pieces, 1)
        return start, stop, 0, width
    low, high = part(width, piece, pieces, LINE)
    return 0, n_rows, low, high


@elementwise
def row(spec: Any, steps: int, i: int) -> Any:
    """Return the byte offset of row i of an operand whose strides begin at spec[steps]."""
    i0, i1, i2 = i // spec[3] // spec[2], i // spec[3] % spec[2], i % spec[3]
    return i0 * spec[steps] + i1 * spec[steps + 1] + i2 * spec[steps + 2]


@elementwise
def _read(address: int, step: int, n: int, block: Any) -> Any:
    """Return n numbers, `step` bytes apart, as a contiguous array: a view, or a copy in `block`."""
    if step == block.itemsize:
        return array_like(block, address, (n,))
    for j in range(n):
        block[j] = array_like(block, address + j * step, (1,))[0]
    return block[:n]
