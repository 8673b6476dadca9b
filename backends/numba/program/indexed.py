"""`take`, `take_along_axis` and `argsort` of the last axis, and `cumulative_sum`, natively."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends.numba.compiled import elementwise
from xformer.backends.numba.program.native import (
    Native,
    float32s,
    int32s,
    native,
    part,
    uint8s,
    words,
)
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.traced import Traced


def taken(program: Program, out: Traced, x: Traced, ids: Traced, axis: int) -> Native | None:
    """How `take` is done of x and ids in C order; None where NumPy does it."""
    rows, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    return _gathered(program, out, x, ids, (rows, x.shape[axis], ids.size, 0, inner))


def taken_along(program: Program, out: Traced, x: Traced, ids: Traced) -> Native | None:
    """The same of `take_along_axis` along the last axis."""
    if x.ndim != ids.ndim or x.shape[:-1] != ids.shape[:-1]:
        return None
    rows, m = math.prod(x.shape[:-1]), ids.shape[-1]
    return _gathered(program, out, x, ids, (rows, x.shape[-1], m, m, 1))


def _gathered(
    program: Program, out: Traced, x: Traced, ids: Traced, sizes: tuple[int, ...]
) -> Native | None:
    size = x.dtype.itemsize
    if ids.dtype != np.int64 or size not in (1, 4, 8) or not out.size:
        return None
    return Native(gather, (*sizes, size), program.pieces(out.size))


def sorted_by(program: Program, x: Traced, *, descending: bool) -> Native | None:
    """How `argsort` of the last axis is done of x in C order; None where NumPy does it."""
    if x.dtype != np.float32 or not x.size:
        return None
    width = x.shape[-1]
    return Native(argsort, (x.size // width, width, int(descending)), program.pieces(x.size))


@native
def gather(args: int, piece: int, pieces: int, memory: int) -> None:
    """y (R, M, I); x (R, N, I), ids, R, N, M, how many ids rows have to themselves, I, bytes.

    0 for ids that there are none of, which NumPy refuses.
    """
    a = words(args, 9)
    n, m, own, inner, size = a[4], a[5], a[6], a[7], a[8]
    start, stop = part(a[3] * m, piece, pieces, 1)
    ids = words(a[2], a[3] * own if own else m)
    for i in range(start, stop):
        row, j = i // m, i % m
        number = ids[row * own + j]
        number = number + n if number < 0 else number
        good = 0 <= number < n
        x = a[1] + (row * n + number if good else 0) * inner * size
        _copy(size, x, a[0] + i * inner * size, inner, good)


@elementwise
def _copy(size: int, x: int, y: int, n: int, good: bool) -> None:
    """n elements of so many bytes, or zeros."""
    if size == 4:
        for j in range(n):
            int32s(y, n)[j] = int32s(x, n)[j] if good else np.int32(0)
    elif size == 8:
        for j in range(n):
            words(y, n)[j] = words(x, n)[j] if good else 0
    else:
        for j in range(n):
            uint8s(y, n)[j] = uint8s(x, n)[j] if good else np.uint8(0)


@native
def argsort(args: int, piece: int, pieces: int, memory: int) -> None:
    """ids (N, M); x (N, M), N, M, whether the largest come first: runs are merged, in their order.

    NaN is the largest, as NumPy has it.
    """
    a = words(args, 5)
    start, stop = part(a[2], piece, pieces, 1)
    width, other = a[3], np.empty(a[3], np.int64)
    for i in range(start, stop):
        x, ids = float32s(a[1] + 4 * i * width, (width,)), words(a[0] + 8 * i * width, width)
        for j in range(width):
            ids[j] = j
        length = 1
        while length < width:
            for first in range(0, width, 2 * length):
                _merge(x, ids, other, first, min(first + length, width), length, a[4])
            ids[:] = other
            length *= 2


@elementwise
def _merge(x: Any, ids: Any, other: Any, first: int, middle: int, length: int, falls: int) -> None:
    """Two sorted runs of ids from `first` and from `middle`, as one."""
    last = min(middle + length, len(ids))
    left, right = first, middle
    for at in range(first, last):
        if right == last or (left < middle and not _precedes(x[ids[right]], x[ids[left]], falls)):
            other[at] = ids[left]
            left += 1
        else:
            other[at] = ids[right]
            right += 1


@elementwise
def _precedes(x: Any, y: Any, falls: int) -> bool:
    """Whether x comes before y, and is not equal to it."""
    low, high = (y, x) if falls else (x, y)
    return low < high or (high != high and low == low)


def summed(program: Program, out: Traced, x: Traced, axis: int) -> Native | None:
    """How `cumulative_sum` is done of x in C order; None where NumPy does it."""
    if x.dtype != out.dtype or x.dtype.name not in ("int64", "float32") or not x.size:
        return None
    rows, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    sizes = rows, x.shape[axis], inner, int(x.dtype == np.int64)
    return Native(cumulate, sizes, min(program.pieces(x.size), rows))


@native
def cumulate(args: int, piece: int, pieces: int, memory: int) -> None:
    """y (R, N, I); x, R, N, I, whether they are int64 and not float32: some of the R."""
    a = words(args, 6)
    n, inner = a[3], a[4]
    start, stop = part(a[2], piece, pieces, 1)
    for i in range(start * n, stop * n):
        at = i * inner
        before = inner if i % n else 0
        if a[5]:
            y, x = words(a[0], (i + 1) * inner), words(a[1], (i + 1) * inner)
            for j in range(at, at + inner):
                y[j] = x[j] + (y[j - before] if before else 0)
        else:
            size = ((i + 1) * inner,)
            real, given = float32s(a[0], size), float32s(a[1], size)
            for j in range(at, at + inner):
                real[j] = given[j] + (real[j - before] if before else np.float32(0))
