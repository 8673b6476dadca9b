"""Matmuls in float32: y = x w + b, and y = sum of several x w.

`product` is a matmul within a kernel: by `tile`, by BLAS, or row by row if x has few rows.
`emit_products` records a matmul as an instruction. Its pieces are rows or columns of y. If x has
few rows and w is large, the inner axis is split: pieces are rows of w, and a second instruction
sums their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.flash_rows import ONE, ZERO, copy
from xformer.backends.numba.jit import FEW, rowwise
from xformer.backends.numba.matmul import AS_IT_IS, ROW_MAJOR, TRANSPOSED, call
from xformer.backends.numba.program.copies import contiguous
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.native import (
    LINE,
    SCRATCH,
    SGEMM,
    TILES,
    Native,
    float32s,
    native,
    numbers,
    part,
    words,
)
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.registers import COLUMNS, HIGH
from xformer.backends.numba.tuning import ALONE, LARGE, SHARE, SHARES, SPEED, VECTORS
from xformer.backends.numba.vectors import matrix_vector, vector_matrix
from xformer.base.typing import Array

NO_BIAS, BIAS_ROW, BIAS_MATRIX = range(3)  # b: absent, (M,), (N, M)


class Pair(NamedTuple):
    """The operands of a matmul."""

    x: Array  # (N, K)
    w: Array  # (K, M)


class PendingSum(NamedTuple):
    """The second instruction of a matmul split along the inner axis: y = sum of parts, + b."""

    y: Array  # (N, M)
    parts: Array  # (pieces, N, M)
    b: Array | None  # (M,)


def matrix_strides(x: Array) -> tuple[int, int] | None:
    """Return the (row stride, column stride) in bytes of a float32 matrix as `product` reads it.

    One of them is 4; None if x has no such layout. NumPy may give an axis of length 1 any stride;
    it is replaced by the stride of a contiguous matrix.
    """
    (n, m), (row, column) = x.shape, x.strides
    if n == 0 or m == 0:
        return 4 * max(m, 1), 4
    if (m == 1 or column == 4) and (n == 1 or row >= 4 * m):
        return (4 * m if n == 1 else row), 4
    if (n == 1 or row == 4) and (m == 1 or column >= 4 * n):
        return 4, (4 * n if m == 1 else column)
    return None


def matmul_operand(x: Array) -> Array:
    """Return x, or a copy if `product` cannot read its layout."""
    return x if matrix_strides(x) else contiguous(x)


def emit_products(name: str, y: Array, pairs: Sequence[Pair], b: Array | None = None) -> None:
    """Record y = sum of x w over all pairs, + b.

    name: of the instruction. y: (N, M), from `Program.fresh`. pairs: x (N, K), w (K, M); K may
    differ between pairs. b: (M,) or (N, M). All are float32.
    """
    pending = emit_parts(name, y, pairs, b)
    emit_sums(name, [] if pending is None else [pending])


def emit_parts(name: str, y: Array, pairs: Sequence[Pair], b: Array | None) -> PendingSum | None:
    """Record a matmul as `emit_products`, except for the second instruction of a split matmul.

    Return what `emit_sums` needs to record that instruction; None if the matmul is not split.
    """
    program: Program = y.program
    pairs = [Pair(matmul_operand(x), matmul_operand(w)) for x, w in pairs]
    (n, m), size = y.shape, y.size * sum(x.shape[1] for x, _ in pairs)
    pieces = program.pieces(size // SPEED)
    bias = NO_BIAS if b is None else (BIAS_ROW, BIAS_MATRIX)[b.ndim - 1]
    if pieces > 1 and len(pairs) == 1 and bias != BIAS_MATRIX and _splits_inner(*pairs[0]):
        (x, w), pieces = pairs[0], _pieces_of_rows(program, pairs[0].w)
        parts = program.fresh((pieces, n, m), np.float32)
        sizes = n, m, len(w), _strides(x)[0], _strides(w)[0]
        program.emit(name, [parts], [x, w], Native(split_products, sizes, pieces, anyone=True))
        return PendingSum(y, parts, b)
    head = n, m, int(n >= m), bias, len(pairs)
    layouts = [number for x, w in pairs for number in (x.shape[1], *_strides(x), *_strides(w))]
    ins = [array for pair in pairs for array in pair] + ([] if b is None else [contiguous(b)])
    row_by_row = (
        n <= VECTORS and len(pairs) == 1 and bias != BIAS_MATRIX and _strides(pairs[0].x)[1] == 4
    )
    if row_by_row and pieces > 1 and n < m:
        pieces = _pieces_of_rows(program, pairs[0].w)
    compiled = Native(products, (*head, *layouts), pieces, not row_by_row, anyone=row_by_row)
    program.emit(name, [y], ins, compiled)
    return None


def _splits_inner(x: Array, w: Array) -> bool:
    """Return whether to split w by rows: x has few rows, and rows of w are contiguous and many."""
    return len(x) <= VECTORS and w.size > LARGE and _strides(x)[1] == _strides(w)[1] == 4


def _pieces_of_rows(program: Program, w: Array) -> int:
    """Return the number of pieces of w: several a thread, so that a late thread computes fewer."""
    return max(program.threads, min(SHARES * program.threads, w.size // SHARE))


def _strides(x: Array) -> tuple[int, int]:
    """Return `matrix_strides` of an array that `matmul_operand` returned."""
    strides = matrix_strides(x)
    assert strides is not None
    return strides


def emit_sums(name: str, pending: Sequence[PendingSum]) -> None:
    """Record the second instructions of split matmuls: y = sum of parts, + b."""
    for y, parts, b in pending:
        sizes = {"S": y.size, "K": len(parts), "M": y.shape[1]}
        ins = [parts] if b is None else [parts, contiguous(b)]
        compiled = Native(add_parts, add_parts.numbers(sizes), y.program.pieces(parts.size))
        y.program.emit(f"{name} sums", [y], ins, compiled)


@rowwise
def product(memory: int, x: Any, w: Any, add: bool, y: Any, sizes: Any) -> None:
    """Compute y = x w, or y += x w if `add`, on this thread alone.

    x (N, K), w (K, M): (address, row stride, column stride), as from `matrix_strides`.
    y (N, M): (address, row stride). sizes: N, M, K. memory: the argument of the calling kernel.
    """
    (x_at, x_row, x_column), (w_at, w_row, w_column), (y_at, y_row) = x, w, y
    n, m, k = sizes
    if n <= 0 or m <= 0:
        return
    thread = words(memory, 3)
    w_by_rows = w_column == 4 and w_row >= 4 * m
    if k == 0:
        for i in range(0 if add else n):
            float32s(y_at + i * y_row, (m,))[:] = ZERO
    elif n <= VECTORS and x_column == 4 and not add:
        for i in range(n):
            row, out = float32s(x_at + i * x_row, (k,)), float32s(y_at + i * y_row, (m,))
            if w_by_rows:
                vector_matrix(row, w_at, w_row // 4, out)
            else:
                matrix_vector(w_at, w_column // 4, row, out)
    elif thread[TILES] and (not w_by_rows or n * m * k > ALONE):
        factors = x_at, x_row, x_column, w_at, w_row, w_column
        call(thread[TILES], (thread[SCRATCH], ONE, *factors, np.int64(add), y_at, y_row, n, m, k))
    else:
        x_by_rows = x_column == 4 and x_row >= 4 * k
        orders = ROW_MAJOR, _order(x_by_rows), _order(w_by_rows)
        x_step = x_row // 4 if x_by_rows else x_column // 4
        w_step = w_row // 4 if w_by_rows else w_column // 4
        beta = ONE if add else ZERO
        call(
            thread[SGEMM],
            (*orders, n, m, k, ONE, x_at, x_step, w_at, w_step, beta, y_at, y_row // 4),
        )


@rowwise
def _order(by_rows: bool) -> Any:
    """Return the transposition argument of CBLAS for a matrix stored by rows or by columns."""
    return AS_IT_IS if by_rows else TRANSPOSED


@rowwise
def add_bias(b: int, y: Any, sizes: Any) -> None:
    """Add b (M,) to each row of y (N, M), in place.

    b: address. y: (address, row stride in bytes). sizes: (N, M).
    """
    n, m = sizes
    bias = float32s(b, (m,))
    for i in range(n):
        row = float32s(y[0] + i * y[1], (m,))
        for j in range(m):
            row[j] += bias[j]


@rowwise
def copy_rows(x: int, x_row: int, y: Any, sizes: Any) -> None:
    """Copy x (N, M) to y (N, M), unless both have the same address.

    x: address. x_row: its row stride in bytes. y: (address, row stride). sizes: (N, M).
    """
    n, m = sizes
    for i in range(n if x != y[0] else 0):
        out, row = float32s(y[0] + i * y[1], (m,)), float32s(x + i * x_row, (m,))
        for j in range(m):
            out[j] = row[j]


@native
def products(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute a piece of y = sum of x w over all pairs, + b; pieces are rows or columns of y.

    outputs: y (N, M); inputs: x (N, K) and w (K, M) of each pair, and b if present. integers: N, M,
    whether pieces are rows, shape of b (`NO_BIAS`, ...), number of pairs, then for each pair K, row
    and column stride of x, row and column stride of w, in bytes.
    """
    a = numbers(args, 5)
    n, m, by_rows, bias, n_pairs = a[0], a[1], a[2], a[3], a[4]
    ptr, layouts = words(args, 2 + 2 * n_pairs), numbers(args, 5 + 5 * n_pairs)[5:]
    row0, row1, column0, column1 = np.int64(0), n, np.int64(0), m  # the block of y
    if by_rows:
        row0, row1 = part(n, piece, pieces, HIGH if n > 4 * HIGH else 1)
    else:
        column0, column1 = part(m, piece, pieces, COLUMNS if m > 2 * COLUMNS else LINE)
    if row0 >= row1 or column0 >= column1:
        return
    first = 4 * (row0 * m + column0)
    y, sizes = (ptr[0] + first, 4 * m), (row1 - row0, column1 - column0)
    if bias == BIAS_MATRIX:
        copy_rows(ptr[1 + 2 * n_pairs] + first, 4 * m, y, sizes)
    for i in range(n_pairs):
        k, x_row, x_column = layouts[5 * i], layouts[5 * i + 1], layouts[5 * i + 2]
        w_row, w_column = layouts[5 * i + 3], layouts[5 * i + 4]
        x = ptr[1 + 2 * i] + row0 * x_row, x_row, x_column
        w = ptr[2 + 2 * i] + column0 * w_column, w_row, w_column
        product(memory, x, w, i > 0 or bias == BIAS_MATRIX, y, (*sizes, k))
    if bias == BIAS_ROW:
        add_bias(ptr[1 + 2 * n_pairs] + 4 * column0, y, sizes)


@native
def split_products(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute parts[piece] = x[:, s] w[s], where s is range number `piece` of the K columns of x.

    `add_parts` adds the parts up. outputs: parts (pieces, N, M); inputs: x (N, K), w (K, M), both
    with stride 1 within a row. integers: N, M, K, row strides of x and of w in bytes.
    """
    a = words(args, 8)
    n, m, k, x_row, w_row = a[3], a[4], a[5], a[6], a[7]
    start, stop = part(k, piece, pieces, LINE)
    for i in range(n):
        out = float32s(a[0] + 4 * (piece * n + i) * m, (m,))
        row = float32s(a[1] + i * x_row + 4 * start, (max(stop - start, 0),))
        vector_matrix(row, a[2] + start * w_row, w_row // 4, out)


@declared("y (S) <- parts (K, S), b? (M)", unit=LINE)
def add_parts(y: Any, parts: Any, b: Any, start: int) -> None:
    """Compute y (N, M) = sum of parts (K, N, M), + b. S = N M."""
    y[:] = ZERO
    for p in range(len(parts)):
        part_y = parts[p, start : start + y.size]
        for j in range(y.size):
            y[j] += part_y[j]
    if b.size:
        for j in range(y.size):
            y[j] += b[(start + j) % b.size]


@declared("out (M) <- x (N, M), b? (M)", unit=LINE)
def sum_rows(out: Any, x: Any, b: Any, start: int, stop: int) -> None:
    """Compute out = sum of the rows of x, + b."""
    n, partial = len(x), np.zeros(out.size, np.float32)
    if b.size:
        copy(b, out)
    else:
        out[:] = ZERO
    for i in range(n):
        row = x[i, start:stop]
        for j in range(out.size):
            partial[j] += row[j]
        if i % FEW == FEW - 1 or i == n - 1:  # a sum of partial sums is more exact
            for j in range(out.size):
                out[j] += partial[j]
            partial[:] = ZERO
