"""Elementwise instructions in float32 and float64: each element of a row once."""

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
from xformer.backends.numba.program.strided import AXES, loop, size_of, words_of
from xformer.backends.numba.program.traced import Traced

CODES = {
    name: code
    for code, name in enumerate(
        (
            *("add", "subtract", "multiply", "divide", "maximum", "minimum"),
            *("negative", "abs", "exp", "log", "sqrt", "square", "tanh", "copy"),
            *("cos", "sin", "pow"),
        )
    )
}
ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, MINIMUM, NEGATIVE, ABS, EXP, LOG, SQRT, SQUARE, TANH = (
    range(13)
)
COS, SIN, POW = 14, 15, 16
LINE, BLOCK = 16, 1024  # elements
NUMBERS = 1 + 4 * AXES  # of an instruction


def natively(
    program: Program, name: str, out: Traced, ins: Sequence[Any]
) -> tuple[Native, list[Any]] | None:
    """How `out` comes of ins without Python, and ins as arrays; None where NumPy computes it."""
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
    own = loop(out.shape, (*layouts, layouts[-1])[:3])
    if own is None:
        return None
    kernel = kernels[len(arrays) - 1]
    return Native(kernel, (code, *words_of(own)), program.pieces(size_of(own))), arrays


@native
def unary32(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; x, code, the loop of y, x and x."""
    a = words(args, 2)
    _all32(a[0], a[1], a[1], words(args + 16, NUMBERS), piece, pieces)


@native
def binary32(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; x1, x2, code, the loop of y, x1 and x2."""
    a = words(args, 3)
    _all32(a[0], a[1], a[2], words(args + 24, NUMBERS), piece, pieces)


@native
def unary64(args: int, piece: int, pieces: int, memory: int) -> None:
    """As `unary32`."""
    a = words(args, 2)
    _all64(a[0], a[1], a[1], words(args + 16, NUMBERS), piece, pieces)


@native
def binary64(args: int, piece: int, pieces: int, memory: int) -> None:
    """As `binary32`."""
    a = words(args, 3)
    _all64(a[0], a[1], a[2], words(args + 24, NUMBERS), piece, pieces)


@elementwise
def _all32(y: int, x1: int, x2: int, own: Any, piece: int, pieces: int) -> None:
    """Some of the rows, or some of each where there are few. own: code, sizes, strides."""
    start, stop, low, high = cut(own[1:5], piece, pieces)
    near = np.empty((2, BLOCK), np.float32)
    for i in range(start, stop):
        at, at1, at2 = y + row(own, 5, i), x1 + row(own, 9, i), x2 + row(own, 13, i)
        for first in range(low, high, BLOCK):
            n = min(BLOCK, high - first)
            in1 = _float32s(at1 + first * own[12], own[12], n, near[0])
            in2 = _float32s(at2 + first * own[16], own[16], n, near[1])
            if own[8] == 4:
                _block(own[0], float32s(at + first * 4, (n,)), in1, in2)
            else:
                _block(own[0], near[0, :n], in1, in2)
                for j in range(n):
                    float32s(at + (first + j) * own[8], (1,))[0] = near[0, j]


@elementwise
def _all64(y: int, x1: int, x2: int, own: Any, piece: int, pieces: int) -> None:
    """The same in float64."""
    start, stop, low, high = cut(own[1:5], piece, pieces)
    near = np.empty((2, BLOCK), np.float64)
    for i in range(start, stop):
        at, at1, at2 = y + row(own, 5, i), x1 + row(own, 9, i), x2 + row(own, 13, i)
        for first in range(low, high, BLOCK):
            n = min(BLOCK, high - first)
            in1 = _float64s(at1 + first * own[12], own[12], n, near[0])
            in2 = _float64s(at2 + first * own[16], own[16], n, near[1])
            if own[8] == 8:
                _block(own[0], float64s(at + first * 8, (n,)), in1, in2)
            else:
                _block(own[0], near[0, :n], in1, in2)
                for j in range(n):
                    float64s(at + (first + j) * own[8], (1,))[0] = near[0, j]


@elementwise
def cut(sizes: Any, piece: int, pieces: int) -> Any:
    """Rows of a loop from and to, and columns from and to."""
    n_rows, width = sizes[0] * sizes[1] * sizes[2], sizes[3]
    if n_rows >= pieces:
        start, stop = part(n_rows, piece, pieces, 1)
        return start, stop, 0, width
    low, high = part(width, piece, pieces, LINE)
    return 0, n_rows, low, high


@elementwise
def row(own: Any, steps: int, i: int) -> Any:
    """How far row i of an operand is, whose strides are at `steps`. own: code, sizes, strides."""
    i0, i1, i2 = i // own[3] // own[2], i // own[3] % own[2], i % own[3]
    return i0 * own[steps] + i1 * own[steps + 1] + i2 * own[steps + 2]


@elementwise
def _float32s(at: int, step: int, n: int, near: Any) -> Any:
    """n elements side by side: as they lie, or copied to `near`."""
    if step == 4:
        return float32s(at, (n,))
    for j in range(n):
        near[j] = float32s(at + j * step, (1,))[0]
    return near[:n]


@elementwise
def _float64s(at: int, step: int, n: int, near: Any) -> Any:
    if step == 8:
        return float64s(at, (n,))
    for j in range(n):
        near[j] = float64s(at + j * step, (1,))[0]
    return near[:n]


@elementwise
def _block(code: int, y: Any, x: Any, z: Any) -> None:
    """y of x, and of z where the code has two ins. NaN stays NaN in maximum and minimum."""
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
    else:
        for j in range(n):
            y[j] = x[j]
