"""Sums, means, maxima and minima over axes. Floats are summed in float64, integers in int64."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.jit import rowwise
from xformer.backends.numba.program.declared import Declared, declared
from xformer.backends.numba.program.native import Native
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
    sizes, dtype = {"M": out.size, "N": x.size // out.size}, x.dtype.name
    is_reduced = [i in reduced for i, n in enumerate(x.shape) if n > 1]
    if is_reduced == sorted(is_reduced):
        pieces = program.pieces(x.size) if out.size >= program.threads else 1
        kernel = ROWS[dtype]
    elif dtype in COLUMNS and is_reduced == sorted(is_reduced, reverse=True):
        pieces = program.pieces(x.size) if out.size >= LINE * program.threads else 1
        kernel = COLUMNS[dtype]
    else:
        return None
    return Native(kernel, kernel.numbers(sizes, code=CODES[name]), pieces)


def _rows(y: Any, x: Any, code: int) -> None:
    """Reduce rows of floats."""
    for i in range(len(y)):
        y[i] = _reduce_row(code, x[i])


@declared("y (M) int64 <- x (M, N) int64")
def _rows_of_wholes(y: Any, x: Any, code: int) -> None:
    """Reduce rows of integers. There is no code MEAN."""
    for i in range(len(y)):
        total = x[i, 0]
        for j in range(1, x.shape[1]):
            if code == SUM:
                total += x[i, j]
            else:
                total = max(total, x[i, j]) if code == MAX else min(total, x[i, j])
        y[i] = total


def _columns(y: Any, x: Any, code: int, start: int, stop: int) -> None:
    """Reduce columns `start` to `stop` of floats."""
    total = np.empty(BLOCK, np.float64)
    for first in range(start, stop, BLOCK):
        end = min(first + BLOCK, stop)
        _reduce_columns(code, x, first, end, total)
        for j in range(first, end):
            y[j - start] = total[j - first]


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


ROWS, COLUMNS = {"int64": _rows_of_wholes}, dict[str, Declared]()
for _dtype in ("float32", "float64"):
    ROWS[_dtype] = declared(f"y (M) {_dtype} <- x (M, N) {_dtype}")(_rows)
    COLUMNS[_dtype] = declared(f"y (M) {_dtype} <- x (N, M) {_dtype}", unit=LINE)(_columns)
