"""Elementwise functions in float32 and float64, over strided arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.compiled import elementwise
from xformer.backends.numba.program.native import (
    Kernel,
    Native,
    float32s,
    float64s,
    native,
    part,
    words,
)
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.strided import AXES, loop_over, size_of, words_of
from xformer.backends.numba.program.traced import Traced

CODES = {
    name: code
    for code, name in enumerate(
        (
            *("add", "subtract", "multiply", "divide", "maximum", "minimum"),
            *("negative", "abs", "exp", "log", "sqrt", "square", "tanh", "copy"),
            *("cos", "sin", "pow", "log1p"),
        )
    )
}
ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, MINIMUM, NEGATIVE, ABS, EXP, LOG, SQRT, SQUARE, TANH = (
    range(13)
)
COS, SIN, POW, LOG1P = 14, 15, 16, 17
LINE, BLOCK = 16, 1024  # elements: of a cache line; that are computed at once
NUMBERS = 1 + 4 * AXES  # words of `spec`: code of the function, sizes, strides of y, x1, x2


def find_native(
    program: Program, name: str, out: Traced, ins: Sequence[Any]
) -> tuple[Native, list[Any]] | None:
    """Return the native form of the function `name`, and ins as arrays; None without a kernel."""
    code, dtype = CODES.get(name), out.dtype
    kernels: tuple[Kernel, ...] | None = {
        "float32": (unary32, binary32),
        "float64": (unary64, binary64),
    }.get(dtype.name)
    if name == "copy" and ins[0].dtype == dtype:
        kernels = {4: (unary32, unary32), 8: (unary64, unary64)}.get(dtype.itemsize)
    if code is None or kernels is None or not out.size:
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
    kernel = kernels[len(arrays) - 1]
    return Native(kernel, (code, *words_of(loop)), program.pieces(size_of(loop))), arrays


@native
def unary32(args: int, piece: int, pieces: int, memory: int) -> None:
    """y = f(x) in float32. outputs: y; inputs: x; integers: spec (with the strides of x twice)."""
    a = words(args, 2)
    _all32(a[0], a[1], a[1], words(args + 16, NUMBERS), piece, pieces)


@native
def binary32(args: int, piece: int, pieces: int, memory: int) -> None:
    """y = f(x1, x2) in float32. outputs: y; inputs: x1, x2; integers: spec."""
    a = words(args, 3)
    _all32(a[0], a[1], a[2], words(args + 24, NUMBERS), piece, pieces)


@native
def unary64(args: int, piece: int, pieces: int, memory: int) -> None:
    """y = f(x) in float64. outputs: y; inputs: x; integers: spec (with the strides of x twice)."""
    a = words(args, 2)
    _all64(a[0], a[1], a[1], words(args + 16, NUMBERS), piece, pieces)


@native
def binary64(args: int, piece: int, pieces: int, memory: int) -> None:
    """y = f(x1, x2) in float64. outputs: y; inputs: x1, x2; integers: spec."""
    a = words(args, 3)
    _all64(a[0], a[1], a[2], words(args + 24, NUMBERS), piece, pieces)


@elementwise
def _all32(y: int, x1: int, x2: int, spec: Any, piece: int, pieces: int) -> None:
    """Compute a piece (see `cut`) in float32. y, x1, x2: addresses. spec: see `NUMBERS`."""
    start, stop, low, high = cut(spec[1:5], piece, pieces)
    block = np.empty((2, BLOCK), np.float32)
    for i in range(start, stop):
        at, at1, at2 = y + row(spec, 5, i), x1 + row(spec, 9, i), x2 + row(spec, 13, i)
        for first in range(low, high, BLOCK):
            n = min(BLOCK, high - first)
            in1 = _float32s(at1 + first * spec[12], spec[12], n, block[0])
            in2 = _float32s(at2 + first * spec[16], spec[16], n, block[1])
            if spec[8] == 4:
                _block(spec[0], float32s(at + first * 4, (n,)), in1, in2)
            else:
                _block(spec[0], block[0, :n], in1, in2)
                for j in range(n):
                    float32s(at + (first + j) * spec[8], (1,))[0] = block[0, j]


@elementwise
def _all64(y: int, x1: int, x2: int, spec: Any, piece: int, pieces: int) -> None:
    """Compute a piece (see `cut`) in float64. y, x1, x2: addresses. spec: see `NUMBERS`."""
    start, stop, low, high = cut(spec[1:5], piece, pieces)
    block = np.empty((2, BLOCK), np.float64)
    for i in range(start, stop):
        at, at1, at2 = y + row(spec, 5, i), x1 + row(spec, 9, i), x2 + row(spec, 13, i)
        for first in range(low, high, BLOCK):
            n = min(BLOCK, high - first)
            in1 = _float64s(at1 + first * spec[12], spec[12], n, block[0])
            in2 = _float64s(at2 + first * spec[16], spec[16], n, block[1])
            if spec[8] == 8:
                _block(spec[0], float64s(at + first * 8, (n,)), in1, in2)
            else:
                _block(spec[0], block[0, :n], in1, in2)
                for j in range(n):
                    float64s(at + (first + j) * spec[8], (1,))[0] = block[0, j]


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
def _float32s(address: int, step: int, n: int, block: Any) -> Any:
    """Return n float32, `step` bytes apart, as a contiguous array: a view, or a copy in `block`."""
    if step == 4:
        return float32s(address, (n,))
    for j in range(n):
        block[j] = float32s(address + j * step, (1,))[0]
    return block[:n]


@elementwise
def _float64s(address: int, step: int, n: int, block: Any) -> Any:
    """Return n float64, `step` bytes apart, as a contiguous array: a view, or a copy in `block`."""
    if step == 8:
        return float64s(address, (n,))
    for j in range(n):
        block[j] = float64s(address + j * step, (1,))[0]
    return block[:n]


@elementwise
def _block(code: int, y: Any, x: Any, z: Any) -> None:
    """Compute y = f(x) or f(x, z), f given by its code. maximum and minimum propagate NaN."""
    n = len(y)
    if code == ADD:
        for j in range(n):
            y[j] = x[j] + z[j]
    elif code == SUBTRACT:
        for j in range(n):
            y[j] = x[j] - z[j]
    elif code == MULTIPLY:
        for j in range(n):
            y[j] = x[j] * z[j]
    elif code == DIVIDE:
        for j in range(n):
            y[j] = x[j] / z[j]
    elif code == MAXIMUM:
        for j in range(n):
            y[j] = x[j] if x[j] > z[j] or x[j] != x[j] else z[j]
    elif code == MINIMUM:
        for j in range(n):
            y[j] = x[j] if x[j] < z[j] or x[j] != x[j] else z[j]
    elif code == NEGATIVE:
        for j in range(n):
            y[j] = -x[j]
    elif code == ABS:
        for j in range(n):
            y[j] = abs(x[j])
    elif code == EXP:
        for j in range(n):
            y[j] = math.exp(x[j])
    elif code == LOG:
        for j in range(n):
            y[j] = math.log(x[j])
    elif code == SQRT:
        for j in range(n):
            y[j] = math.sqrt(x[j])
    elif code == SQUARE:
        for j in range(n):
            y[j] = x[j] * x[j]
    elif code == TANH:
        for j in range(n):
            y[j] = math.tanh(x[j])
    elif code == COS:
        for j in range(n):
            y[j] = math.cos(x[j])
    elif code == SIN:
        for j in range(n):
            y[j] = math.sin(x[j])
    elif code == POW:
        for j in range(n):
            y[j] = math.pow(x[j], z[j])
    elif code == LOG1P:
        for j in range(n):
            y[j] = math.log1p(x[j])
    else:
        for j in range(n):
            y[j] = x[j]
