"""Grouped matmuls for a mixture of experts: each row is multiplied by its expert's matrix.

A choice is one of the M = N C elements of ids (N, C). `emit_order` sorts the choices by expert:
expert e has the sorted rows ends[e] to ends[e + 1]. The number of rows of an expert is known only
in a run: kernels read `ends` in each run. They never access a row outside [0, M), whatever values
`ends` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.kernels.embedding import take_rows
from xformer.backends.numba.kernels.gemm import Pair, matrix_strides, product
from xformer.backends.numba.kernels.layout import record
from xformer.backends.numba.program.copies import contiguous
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.native import LINE, Native, native, numbers, part, words
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.registers import HIGH
from xformer.backends.numba.tuning import SPEED, VECTORS
from xformer.base.typing import Array


class Order(NamedTuple):
    """Choices sorted by expert; the sort is stable."""

    choices: Array  # (M,): the choice (an index of ids.ravel()) of each sorted row
    rows: Array  # (M,): the row of x, in [0, N), of each sorted row
    positions: Array  # (M,): the sorted row of each choice; the inverse of `choices`
    ends: Array  # (E + 1,): the first sorted row of each expert, then M


def emit_order(program: Program, ids: Array, n_experts: int) -> Order:
    """Record the sort of choices by expert. ids: (N, C) int64, checked to be in [0, E)."""
    shapes = {"M": (ids.size,), "E1": (n_experts + 1,)}
    name = "experts order"
    return Order(*record(sort, name, ids, program=program, shapes=shapes, pieces=1))


@declared(
    "choices (M) int64, rows (M) int64, positions (M) int64, ends (E1) int64 <- ids (N, C) int64"
)
def sort(choices: Any, rows: Any, positions: Any, ends: Any, ids: Any) -> None:
    """Sort the choices by expert (counting sort).

    The ids were checked, but the caller may change their array during a run: each id is read once
    and clamped to [0, E).
    """
    m, c, n_experts = len(choices), ids.shape[1], len(ends) - 1
    flat = ids.reshape(m)
    ends[:] = 0
    for i in range(m):
        positions[i] = min(max(flat[i], 0), n_experts - 1)  # the expert, at first
        ends[positions[i] + 1] += 1
    for e in range(n_experts):
        ends[e + 1] += ends[e]
    next_rows = ends.copy()  # the next free sorted row of each expert
    for i in range(m):
        e = positions[i]
        row = next_rows[e]
        choices[row], rows[row], positions[i] = i, i // c, row
        next_rows[e] += 1


def emit_rows(name: str, x: Array, order: Order) -> Array:
    """Return the rows of x (N, D) that the choices belong to, sorted by expert: (M, D)."""
    return record(take_rows, name, x, order.rows)[0]


def emit_sums(name: str, x: Array, order: Order, n: int) -> Array:
    """Return y (n, D): for each row, the sum of x (M, D), sorted by expert, over its C choices."""
    n_choices = x.shape[0] // max(n, 1)
    pieces = order.rows.program.pieces(x.size + n * x.shape[1])
    return record(
        sum_choices, name, x, order.positions, shapes={"N": (n,)}, pieces=pieces, c=n_choices
    )[0]


@declared("y (N, D) <- x (M, D), positions (M) int64")
def sum_choices(y: Any, x: Any, positions: Any, start: int, stop: int, c: int) -> None:
    """Compute the rows y[i] = sum over c choices of x[positions[i c + ...]], x sorted by expert."""
    for i in range(start, stop):
        total = y[i - start]
        total[:] = np.float32(0)
        for position in positions[i * c : (i + 1) * c]:
            if 0 <= position < len(x):
                addend = x[position]
                for j in range(addend.size):
                    total[j] += addend[j]


def emit_grouped(name: str, pairs: Sequence[Pair], order: Order) -> Array:
    """Return y (M, O), the sum over all pairs of x w[e], e the expert of a row.

    name: of the instruction. pairs: x (M, K), sorted by expert, and w (E, K, O); K may differ
    between pairs.
    """
    program, (x, w) = order.rows.program, pairs[0]
    pairs = [Pair(x, w if matrix_strides(w[0]) else contiguous(w)) for x, w in pairs]
    y = program.fresh((x.shape[0], w.shape[2]), np.float32)
    (n, m), layouts = y.shape, list[int]()
    pieces = program.pieces(y.size * sum(x.shape[1] for x, _ in pairs) // SPEED)
    for x, w in pairs:
        layouts += [x.shape[1], w.strides[0], *(matrix_strides(w[0]) or ())]
    # A few rows are multiplied as vectors. Each piece gets whole rows if they divide evenly.
    by_rows = n >= m or (n <= VECTORS and n % pieces == 0)
    sizes = n, m, len(w), int(by_rows), len(pairs), *layouts
    ins = [order.ends, *(array for pair in pairs for array in pair)]
    program.emit(name, [y], ins, Native(grouped, sizes, pieces, blas=True))
    return y


@native
def grouped(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute a piece of y = sum over all pairs of x w[e], e the expert of a row.

    outputs: y (M, O); inputs: ends (E + 1,) int64, then x (M, K) and w (E, K, O) of each pair.
    integers: M, O, E, whether pieces are rows (or columns) of y, number of pairs, then for each
    pair K and the strides in bytes of w between matrices, rows and columns.
    """
    a = numbers(args, 5)
    n, m, n_experts, by_rows, n_pairs = a[0], a[1], a[2], a[3], a[4]
    ptr, layouts = words(args, 2 + 2 * n_pairs), numbers(args, 5 + 4 * n_pairs)[5:]
    ends = words(ptr[1], n_experts + 1)
    row0, row1, column0, column1 = np.int64(0), n, np.int64(0), m  # the block of y
    if by_rows:
        row0, row1 = part(n, piece, pieces, 1)
    else:
        column0, column1 = part(m, piece, pieces, LINE)
    for e in range(n_experts):
        start, stop = max(ends[e], row0), min(ends[e + 1], row1)
        for i in range(n_pairs if start < stop and column0 < column1 else 0):
            k, w_matrix = layouts[4 * i], layouts[4 * i + 1]
            w_row, w_column = layouts[4 * i + 2], layouts[4 * i + 3]
            x = ptr[2 + 2 * i] + 4 * start * k, 4 * k, np.int64(4)
            w = ptr[3 + 2 * i] + e * w_matrix + column0 * w_column, w_row, w_column
            y = ptr[0] + 4 * (start * m + column0), 4 * m
            product(memory, x, w, i > 0, y, (stop - start, column1 - column0, k))


def emit_gradient(name: str, x: Array, w: Array, dy: Array, order: Order) -> Array:
    """Return dw (E, I, O) = x^T dy of each expert's rows, in the memory layout of w.

    name: of the instruction. x (M, I), dy (M, O): sorted by expert.
    """
    layout = matrix_strides(w[0])
    if layout is not None and layout[1] != 4:
        return emit_gradient(name, dy, w.mT, x, order).mT
    program, (m, i), o = order.rows.program, x.shape, dy.shape[1]
    dw = program.fresh((len(w), i, o), np.float32)
    sizes, pieces = (m, i, o, len(w), int(i >= o)), program.pieces(m * i * o // SPEED + dw.size)
    compiled = Native(gradient, sizes, pieces, blas=True)
    program.emit(name, [dw], [order.ends, x, dy], compiled)
    return dw


@native
def gradient(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute a piece of each matrix of dw: dw[e] = x^T dy of the rows of expert e.

    outputs: dw (E, I, O); inputs: ends (E + 1,) int64, x (M, I), dy (M, O). integers: M, I, O, E,
    whether pieces are rows (or columns) of each matrix.
    """
    a = words(args, 9)
    n, height, width, n_experts = a[4], a[5], a[6], a[7]
    ends = words(a[1], n_experts + 1)
    # The block of each dw[e].
    row0, row1, column0, column1 = np.int64(0), height, np.int64(0), width
    if a[8]:
        row0, row1 = part(height, piece, pieces, HIGH if height > 4 * HIGH else 1)
    else:
        column0, column1 = part(width, piece, pieces, LINE)
    for e in range(n_experts):
        start = min(max(ends[e], 0), n)
        k = min(max(ends[e + 1], start), n) - start
        x = a[2] + 4 * (start * height + row0), np.int64(4), 4 * height
        dy = a[3] + 4 * (start * width + column0), 4 * width, np.int64(4)
        dw = a[0] + 4 * ((e * height + row0) * width + column0), 4 * width
        product(memory, x, dy, False, dw, (row1 - row0, column1 - column0, k))
