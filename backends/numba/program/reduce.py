"""Sums, means, maxima and minima over axes. Floats are summed in float64, integers in int64."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.program.native import Native, float32s, float64s, native, part, words
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.traced import Traced

SUM, MEAN, MAX, MIN = range(4)
CODES = {"sum": SUM, "mean": MEAN, "max": MAX, "min": MIN}
LINE, BLOCK = 16, 256  # elements: of a cache line; columns that are reduced at once


def is_known(name: str, out: Traced, x: Traced) -> bool:
    """Return whether a kernel reduces the last axes of a C-contiguous x by the function `name`."""
    names = {"float32": CODES, "float64": CODES, "int64": {*CODES} - {"mean"}}
    return name in names.get(x.dtype.name, ()) and x.dtype == out.dtype


def find_native(
    program: Program, name: str, out: Traced, x: Traced, reduced: set[int]
) -> Native | None:
    """Return the native form of the reduction of x to `out`; None if it has no kernel.

    A kernel needs a C-contiguous x, and reduces its last axes; of floats also its first axes. x
    must not be empty. reduced: the axes.
    """
    if not is_known(name, out, x) or not x.layout.flags.c_contiguous:
        return None
    kernels = {
        "float32": (rows32, columns32),
        "float64": (rows64, columns64),
        "int64": (rows_whole, None),
    }[x.dtype.name]
    is_reduced = [i in reduced for i, n in enumerate(x.shape) if n > 1]
    numbers = CODES[name], out.size, x.size // out.size
    if is_reduced == sorted(is_reduced):
        pieces = program.pieces(x.size) if out.size >= program.threads else 1
        return Native(kernels[0], numbers, pieces)
    if kernels[1] is not None and is_reduced == sorted(is_reduced, reverse=True):
        pieces = program.pieces(x.size) if out.size >= LINE * program.threads else 1
        return Native(kernels[1], numbers, pieces)
    return None


@native
def rows32(args: int, piece: int, pieces: int, memory: int) -> None:
    """Reduce each row, in float32. outputs: y (m,); inputs: x (m, n); integers: code, m, n.

    A piece is a range of rows.
    """
    a = words(args, 5)
    start, stop = part(a[3], piece, pieces, 1)
    y, x = float32s(a[0], (a[3],)), float32s(a[1], (a[3], a[4]))
    for i in range(start, stop):
        y[i] = _reduce_row(a[2], x[i])


@native
def rows64(args: int, piece: int, pieces: int, memory: int) -> None:
    """Reduce each row, in float64. outputs: y (m,); inputs: x (m, n); integers: code, m, n.

    A piece is a range of rows.
    """
    a = words(args, 5)
    start, stop = part(a[3], piece, pieces, 1)
    y, x = float64s(a[0], (a[3],)), float64s(a[1], (a[3], a[4]))
    for i in range(start, stop):
        y[i] = _reduce_row(a[2], x[i])


@native
def rows_whole(args: int, piece: int, pieces: int, memory: int) -> None:
    """Reduce each row, in int64. outputs: y (m,); inputs: x (m, n); integers: code, m, n.

    A piece is a range of rows. There is no code MEAN.
    """
    a = words(args, 5)
    start, stop = part(a[3], piece, pieces, 1)
    y, x = words(a[0], a[3]), words(a[1], a[3] * a[4])
    for i in range(start, stop):
        total = x[i * a[4]]
        for j in range(i * a[4] + 1, (i + 1) * a[4]):
            if a[2] == SUM:
                total += x[j]
            else:
                total = max(total, x[j]) if a[2] == MAX else min(total, x[j])
        y[i] = total


@native
def columns32(args: int, piece: int, pieces: int, memory: int) -> None:
    """Reduce each column, in float32. outputs: y (m,); inputs: x (n, m); integers: code, m, n.

    A piece is a range of columns.
    """
    a = words(args, 5)
    start, stop = part(a[3], piece, pieces, LINE)
    total = np.empty(BLOCK, np.float64)
    y, x = float32s(a[0], (a[3],)), float32s(a[1], (a[4], a[3]))
    for first in range(start, stop, BLOCK):
        end = min(first + BLOCK, stop)
        _reduce_columns(a[2], x, first, end, total)
        for j in range(first, end):
            y[j] = total[j - first]


@native
def columns64(args: int, piece: int, pieces: int, memory: int) -> None:
    """Reduce each column, in float64. outputs: y (m,); inputs: x (n, m); integers: code, m, n.

    A piece is a range of columns.
    """
    a = words(args, 5)
    start, stop = part(a[3], piece, pieces, LINE)
    total = np.empty(BLOCK, np.float64)
    y, x = float64s(a[0], (a[3],)), float64s(a[1], (a[4], a[3]))
    for first in range(start, stop, BLOCK):
        end = min(first + BLOCK, stop)
        _reduce_columns(a[2], x, first, end, total)
        for j in range(first, end):
            y[j] = total[j - first]


@rowwise
def _reduce_row(code: int, x: Any) -> Any:
    """Return the sum, mean, maximum or minimum of a row in float64. NaN is propagated."""
    total = np.float64(0)
    if code <= MEAN:
        for j in range(len(x)):
            total += np.float64(x[j])
        return total / len(x) if code == MEAN else total
    total = np.float64(x[0])
    for j in range(1, len(x)):
        value = np.float64(x[j])
        if value != value or (value > total if code == MAX else value < total):
            total = value
    return total


@rowwise
def _reduce_columns(code: int, x: Any, start: int, stop: int, total: Any) -> None:
    """Reduce columns `start` to `stop` of x (n, m) into float64 `total`, row after row."""
    for j in range(start, stop):
        total[j - start] = x[0, j]
    for i in range(1, len(x)):
        row = x[i]
        if code <= MEAN:
            for j in range(start, stop):
                total[j - start] += row[j]
        elif code == MAX:
            for j in range(start, stop):
                if row[j] != row[j] or row[j] > total[j - start]:
                    total[j - start] = row[j]
        else:
            for j in range(start, stop):
                if row[j] != row[j] or row[j] < total[j - start]:
                    total[j - start] = row[j]
    if code == MEAN:
        for j in range(stop - start):
            total[j] /= len(x)
