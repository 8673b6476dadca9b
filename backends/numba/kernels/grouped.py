"""Products of rows that chose among E matrices: how many chose each is known only in a run.

A choice is one of the M = N C elements of ids (N, C). `emit_order` sorts the choices by expert:
expert e has the sorted rows ends[e] to ends[e + 1]. Kernels read `ends` in each run, and stay
within M rows whatever they find there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.kernels.embedding import take_rows
from xformer.backends.numba.kernels.gemm import Pair, product, steps
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import (
    LINE,
    Native,
    float32s,
    native,
    numbers,
    part,
    words,
)
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.registers import HIGH
from xformer.backends.numba.tuning import SPEED, VECTORS
from xformer.typing import Array


class Order(NamedTuple):
    """Choices sorted by expert; the sort is stable."""

    choices: Array  # (M,): numbers of choices
    rows: Array  # (M,): the row of each, from 0 to N
    places: Array  # (M,): where each choice is; the inverse of `choices`
    ends: Array  # (E + 1,)


def emit_order(program: Program, ids: Array, n_experts: int) -> Order:
    """ids: (N, C) int64, checked."""
    m, (n, c) = ids.size, ids.shape
    order = Order(*(program.fresh((size,), np.int64) for size in (m, m, m, n_experts + 1)))
    own = Native(sort, (n, c, n_experts))
    program.emit("experts order", _run_order, order, [contiguous(ids)], own)
    return order


def _run_order(choices: Any, rows: Any, places: Any, ends: Any, ids: Any) -> None:
    choices[...] = np.argsort(ids, axis=None, kind="stable")
    rows[...] = choices // max(ids.shape[1], 1)
    places[choices] = np.arange(ids.size)
    ends[...] = np.searchsorted(np.sort(ids, axis=None), np.arange(len(ends)))


@native
def sort(args: int, piece: int, pieces: int, memory: int) -> None:
    """choices, rows, places, ends; ids, N, C, E.

    ids were checked, but lie where others may write: they are read once.
    """
    a = words(args, 8)
    n_choices, c, n_experts = a[5] * a[6], a[6], a[7]
    choices, rows, places = words(a[0], n_choices), words(a[1], n_choices), words(a[2], n_choices)
    ends, ids = words(a[3], n_experts + 1), words(a[4], n_choices)
    ends[:] = 0
    for i in range(n_choices):
        places[i] = min(max(ids[i], 0), n_experts - 1)
        ends[places[i] + 1] += 1
    for e in range(n_experts):
        ends[e + 1] += ends[e]
    following = ends.copy()
    for i in range(n_choices):
        e = places[i]
        at = following[e]
        choices[at], rows[at], places[i] = i, i // c, at
        following[e] += 1


def emit_rows(name: str, x: Array, order: Order) -> Array:
    """(M, D): the row of x (N, D) of each choice, in order."""
    program, m, (n, width) = order.rows.program, order.rows.size, x.shape
    own = program.fresh((m, width), np.float32)

    def run(own: Any, x: Any, rows: Any) -> None:
        np.take(x, rows, axis=0, out=own)

    kernel = Native(take_rows, (m, n, width), program.pieces(own.size))
    program.emit(name, run, [own], [contiguous(x), order.rows], kernel)
    return own


def emit_sums(name: str, x: Array, order: Order, n: int) -> Array:
    """(N, D): sums of the rows of x (M, D), of the choices in order, that each of N rows has."""
    program, (m, width) = order.rows.program, x.shape
    y = program.fresh((n, width), np.float32)

    def run(y: Any, x: Any, places: Any) -> None:
        np.sum(x[places.reshape(n, m // max(n, 1))], axis=1, out=y)

    own = Native(add_places, (n, m // max(n, 1), width), program.pieces(x.size + y.size))
    program.emit(name, run, [y], [x, order.places], own)
    return y


@native
def add_places(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; x, places, N, C, D: some of the rows, C after each other."""
    a = words(args, 6)
    n, c, width = a[3], a[4], a[5]
    places = words(a[2], n * c)
    start, stop = part(n, piece, pieces, 1)
    for i in range(start, stop):
        y = float32s(a[0] + 4 * i * width, (width,))
        y[:] = np.float32(0)
        for place in places[i * c : (i + 1) * c]:
            if 0 <= place < n * c:
                x = float32s(a[1] + 4 * place * width, (width,))
                for j in range(width):
                    y[j] += x[j]


def emit_grouped(name: str, pairs: Sequence[Pair], order: Order) -> Array:
    """y (M, O): sums of x w[e] over all pairs, e the expert of the row. x: (M, K), w: (E, K, O)."""
    program, (x, w) = order.rows.program, pairs[0]
    pairs = [Pair(x, w if steps(w[0]) else contiguous(w)) for x, w in pairs]
    y = program.fresh((x.shape[0], w.shape[2]), np.float32)
    (n, m), layouts = y.shape, list[int]()
    pieces = program.pieces(y.size * sum(x.shape[1] for x, _ in pairs) // SPEED)
    for x, w in pairs:
        layouts += [x.shape[1], w.strides[0], *(steps(w[0]) or ())]
    # A few rows are multiplied as vectors. Each piece gets whole rows if they divide evenly.
    by_rows = n >= m or (n <= VECTORS and n % pieces == 0)
    sizes = n, m, len(w), int(by_rows), len(pairs), *layouts
    ins = [order.ends, *(array for pair in pairs for array in pair)]
    program.emit(name, _run_grouped, [y], ins, Native(grouped, sizes, pieces, blas=True))
    return y


def _run_grouped(y: Any, ends: Any, *pairs: Any) -> None:
    for e, (start, stop) in enumerate(pairwise(ends)):
        y[start:stop] = pairs[0][start:stop] @ pairs[1][e]
        for x, w in zip(pairs[2::2], pairs[3::2], strict=True):
            y[start:stop] += x[start:stop] @ w[e]


@native
def grouped(args: int, piece: int, pieces: int, memory: int) -> None:
    """y (M, O); ends, x and w of each pair.

    M, O, E, whether pieces are rows, how many pairs, and of each K, bytes from matrix to matrix,
    from row to row and from column to column of w.
    """
    a = numbers(args, 5)
    n, m, n_experts, by_rows, n_pairs = a[0], a[1], a[2], a[3], a[4]
    at, layouts = words(args, 2 + 2 * n_pairs), numbers(args, 5 + 4 * n_pairs)[5:]
    ends = words(at[1], n_experts + 1)
    top, bottom, left, right = np.int64(0), n, np.int64(0), m
    if by_rows:
        top, bottom = part(n, piece, pieces, 1)
    else:
        left, right = part(m, piece, pieces, LINE)
    for e in range(n_experts):
        start, stop = max(ends[e], top), min(ends[e + 1], bottom)
        for i in range(n_pairs if start < stop and left < right else 0):
            k, apart, down, across = (
                layouts[4 * i],
                layouts[4 * i + 1],
                layouts[4 * i + 2],
                layouts[4 * i + 3],
            )
            x = at[2 + 2 * i] + 4 * start * k, 4 * k, np.int64(4)
            w = at[3 + 2 * i] + e * apart + left * across, down, across
            y = at[0] + 4 * (start * m + left), 4 * m
            product(memory, x, w, i > 0, y, (stop - start, right - left, k))


def emit_gradient(name: str, x: Array, w: Array, dy: Array, order: Order) -> Array:
    """dw (E, I, O) = x^T dy of each expert's rows, which lies as w does. x: (M, I), dy: (M, O)."""
    layout = steps(w[0])
    if layout is not None and layout[1] != 4:
        return emit_gradient(name, dy, w.mT, x, order).mT
    program, (m, i), o = order.rows.program, x.shape, dy.shape[1]
    dw = program.fresh((len(w), i, o), np.float32)
    sizes, pieces = (m, i, o, len(w), int(i >= o)), program.pieces(m * i * o // SPEED + dw.size)
    own = Native(gradient, sizes, pieces, blas=True)
    program.emit(name, _run_gradient, [dw], [order.ends, x, dy], own)
    return dw


def _run_gradient(dw: Any, ends: Any, x: Any, dy: Any) -> None:
    for e, (start, stop) in enumerate(pairwise(ends)):
        dw[e] = x[start:stop].T @ dy[start:stop]


@native
def gradient(args: int, piece: int, pieces: int, memory: int) -> None:
    """dw (E, I, O); ends, x, dy, M, I, O, E, whether pieces are rows of each matrix of dw."""
    a = words(args, 9)
    n, height, width, n_experts = a[4], a[5], a[6], a[7]
    ends = words(a[1], n_experts + 1)
    top, bottom, left, right = np.int64(0), height, np.int64(0), width
    if a[8]:
        top, bottom = part(height, piece, pieces, HIGH if height > 4 * HIGH else 1)
    else:
        left, right = part(width, piece, pieces, LINE)
    for e in range(n_experts):
        start = min(max(ends[e], 0), n)
        k = min(max(ends[e + 1], start), n) - start
        x = a[2] + 4 * (start * height + top), np.int64(4), 4 * height
        dy = a[3] + 4 * (start * width + left), 4 * width, np.int64(4)
        dw = a[0] + 4 * ((e * height + top) * width + left), 4 * width
        product(memory, x, dy, False, dw, (bottom - top, right - left, k))
