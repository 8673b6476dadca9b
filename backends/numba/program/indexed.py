"""Kernels of `take`, `cumulative_sum`, and `take_along_axis` and `argsort` along the last axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xformer.backends.numba.jit import elementwise
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.native import (
    NOTHING,
    Native,
    int32s,
    native,
    numbers,
    part,
    uint8s,
    words,
)
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.traced import Traced


def native_take(program: Program, out: Traced, x: Traced, ids: Traced, axis: int) -> Native | None:
    """Return the native form of `take` for C-contiguous x and ids; None if it has no kernel."""
    rows, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    return _native_gather(program, out, x, ids, (rows, x.shape[axis], ids.size, 0, inner))


def native_take_along(program: Program, out: Traced, x: Traced, ids: Traced) -> Native | None:
    """Return the native form of `take_along_axis` along the last axis; None if it has no kernel.

    x and ids must be C-contiguous.
    """
    if x.ndim != ids.ndim or x.shape[:-1] != ids.shape[:-1]:
        return None
    rows, m = math.prod(x.shape[:-1]), ids.shape[-1]
    return _native_gather(program, out, x, ids, (rows, x.shape[-1], m, m, 1))


def _native_gather(
    program: Program, out: Traced, x: Traced, ids: Traced, sizes: tuple[int, ...]
) -> Native | None:
    """Return the native form of `gather`; None if dtypes do not fit.

    sizes: the first 5 integers of `gather`
    """
    size = x.dtype.itemsize
    if ids.dtype != np.int64 or size not in (1, 4, 8) or not out.size:
        return None
    return Native(gather, (*NOTHING, *sizes, size), program.pieces(out.size))


def out_of_range(size: int, axis: int) -> Callable[[Any], None]:
    """Return a function that raises IndexError for a wrong index along an axis of this size."""

    def raises(wrong: Any) -> None:
        raise IndexError(f"index {wrong[0]} is out of bounds for axis {axis} with size {size}")

    return raises


def native_argsort(program: Program, x: Traced, *, descending: bool) -> Native | None:
    """Return the native form of `argsort` along the last axis; None if it has no kernel.

    x must be C-contiguous.
    """
    if x.dtype != np.float32 or not x.size:
        return None
    sizes = {"N": x.size // x.shape[-1], "M": x.shape[-1]}
    return Native(argsort, argsort.numbers(sizes, descending=descending), program.pieces(x.size))


@native
def gather(args: int, piece: int, pieces: int, memory: int) -> None:
    """y[r, m] = x[r, ids[r, m]], or x[r, ids[m]] if all rows share the ids.

    outputs: y (R, M, I); inputs: x (R, N, I), ids (R, M) or (M,);
    integers: three results of the check (failed, a wrong id, not used; at first `NOTHING`), R, N,
    M, the number of ids of each row (M, or 0 if rows share them), I, bytes of an element.
    Ids are in [-N, N); for another id the check fails, and 0 is written.
    """
    a, check = words(args, 12), numbers(args, 2)
    n, m, ids_per_row, inner, size = a[7], a[8], a[9], a[10], a[11]
    start, stop = part(a[6] * m, piece, pieces, 1)
    ids = words(a[2], a[6] * ids_per_row if ids_per_row else m)
    for i in range(start, stop):
        row, j = i // m, i % m
        index = ids[row * ids_per_row + j]
        index = index + n if index < 0 else index
        in_range = 0 <= index < n
        if not in_range:
            check[0], check[1] = 1, ids[row * ids_per_row + j]
        x = a[1] + (row * n + index if in_range else 0) * inner * size
        _copy(size, x, a[0] + i * inner * size, inner, in_range)


@elementwise
def _copy(size: int, x: int, y: int, n: int, in_range: bool) -> None:
    """Copy n elements of `size` bytes from address x to address y; zeros if not `in_range`."""
    if size == 4:
        for j in range(n):
            int32s(y, n)[j] = int32s(x, n)[j] if in_range else np.int32(0)
    elif size == 8:
        for j in range(n):
            words(y, n)[j] = words(x, n)[j] if in_range else 0
    else:
        for j in range(n):
            uint8s(y, n)[j] = uint8s(x, n)[j] if in_range else np.uint8(0)


@declared("ids (N, M) int64 <- x (N, M)")
def argsort(ids: Any, x: Any, descending: int) -> None:
    """Sort each row by a stable merge sort. NaN is the largest number, as in NumPy."""
    n, width = x.shape
    merged = np.empty(width, np.int64)
    for i in range(n):
        for j in range(width):
            ids[i, j] = j
        length = 1
        while length < width:
            for first in range(0, width, 2 * length):
                middle = min(first + length, width)
                _merge(x[i], ids[i], merged, first, middle, length, descending)
            ids[i] = merged
            length *= 2


@elementwise
def _merge(
    x: Any, ids: Any, merged: Any, first: int, middle: int, length: int, descending: int
) -> None:
    """Merge two sorted ranges of ids into `merged`: from first, and `length` ids from middle."""
    last = min(middle + length, len(ids))
    left, right = first, middle
    for at in range(first, last):
        is_left = right == last or (
            left < middle and not _precedes(x[ids[right]], x[ids[left]], descending)
        )
        if is_left:
            merged[at] = ids[left]
            left += 1
        else:
            merged[at] = ids[right]
            right += 1


@elementwise
def _precedes(x: Any, y: Any, descending: int) -> bool:
    """Return whether x is sorted before y; False if they are equal."""
    low, high = (y, x) if descending else (x, y)
    return low < high or (high != high and low == low)


def native_cumulative_sum(program: Program, out: Traced, x: Traced, axis: int) -> Native | None:
    """Return the native form of `cumulative_sum` for a C-contiguous x; None if it has no kernel."""
    if x.dtype != out.dtype or x.dtype.name not in CUMULATE or not x.size:
        return None
    rows, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    kernel, sizes = CUMULATE[x.dtype.name], {"R": rows, "N": x.shape[axis], "I": inner}
    return Native(kernel, kernel.numbers(sizes), min(program.pieces(x.size), rows))


def _cumulate(y: Any, x: Any) -> None:
    """Sum cumulatively along the second axis."""
    n_rows, n, inner = x.shape
    for r in range(n_rows):
        for i in range(n):
            for j in range(inner):
                y[r, i, j] = x[r, i, j] + (y[r, i - 1, j] if i else x.dtype.type(0))


CUMULATE = {
    dtype: declared(f"y (R, N, I) {dtype} <- x (R, N, I) {dtype}")(_cumulate)
    for dtype in ("int64", "float32")
}
