"""Products of matrices in float32: y = x w, sums of several, + b.

`product` is a part of kernels: by `tile`, by BLAS where it is small, or a vector's. `emit_products`
records an instruction, whose pieces are rows or columns of y; of few rows, each as a vector, its
pieces are rows of w, and another instruction adds what they give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.compiled import FEW, rowwise
from xformer.backends.numba.flash_rows import ONE, ZERO
from xformer.backends.numba.gemm import AS_IT_IS, ROW_MAJOR, TRANSPOSED, call
from xformer.backends.numba.program.namespace import contiguous
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
from xformer.typing import Array

NOTHING, ROW, WHOLE = range(3)  # what is added to a product


class Pair(NamedTuple):
    """Factors of a product."""

    x: Array  # (N, K)
    w: Array  # (K, M)


class Sums(NamedTuple):
    """y = sums of parts (P, N, M) + b, which is not recorded yet."""

    y: Array
    parts: Array
    b: Array | None


def steps(x: Array) -> tuple[int, int] | None:
    """Bytes from row to row and column to column, one of them 4; None where neither can be.

    The stride of an axis of length 1 may be any number.
    """
    (n, m), (down, across) = x.shape, x.strides
    if n == 0 or m == 0:
        return 4 * max(m, 1), 4
    if (m == 1 or across == 4) and (n == 1 or down >= 4 * m):
        return (4 * m if n == 1 else down), 4
    if (n == 1 or down == 4) and (m == 1 or across >= 4 * n):
        return 4, (4 * n if m == 1 else across)
    return None


def factor(x: Array) -> Array:
    """x, or a copy where `product` cannot read it as it lies."""
    return x if steps(x) else contiguous(x)


def emit_products(name: str, y: Array, pairs: Sequence[Pair], b: Array | None = None) -> None:
    """y (N, M) = the sum of x w over all pairs, + b, (M,) or (N, M). float32, and y is `fresh`."""
    emit_sums(name, [sums for sums in [emit_parts(name, y, pairs, b)] if sums])


def emit_parts(name: str, y: Array, pairs: Sequence[Pair], b: Array | None) -> Sums | None:
    """As `emit_products`; or parts of the product alone, that `emit_sums` has to add."""
    program: Program = y.program
    pairs = [Pair(factor(x), factor(w)) for x, w in pairs]
    (n, m), size = y.shape, y.size * sum(x.shape[1] for x, _ in pairs)
    pieces = program.pieces(size // SPEED)
    added = NOTHING if b is None else (ROW, WHOLE)[b.ndim - 1]
    if pieces > 1 and len(pairs) == 1 and added != WHOLE and _are_vectors(*pairs[0]):
        (x, w), pieces = pairs[0], _shares(program, pairs[0].w)
        parts = program.fresh((pieces, n, m), np.float32)
        sizes = n, m, len(w), _steps(x)[0], _steps(w)[0]
        program.emit(name, _run_parts, [parts], [x, w], Native(vectors, sizes, pieces, anyone=True))
        return Sums(y, parts, b)
    head = n, m, int(n >= m), added, len(pairs)
    layouts = [number for x, w in pairs for number in (x.shape[1], *_steps(x), *_steps(w))]
    ins = [array for pair in pairs for array in pair] + ([] if b is None else [contiguous(b)])
    one_by_one = n <= VECTORS and len(pairs) == 1 and added != WHOLE and _steps(pairs[0].x)[1] == 4
    if one_by_one and pieces > 1 and n < m:
        pieces = _shares(program, pairs[0].w)
    own = Native(products, (*head, *layouts), pieces, not one_by_one, anyone=one_by_one)
    program.emit(name, _running(len(pairs)), [y], ins, own)
    return None


def _are_vectors(x: Array, w: Array) -> bool:
    """Whether few rows meet many rows of w, which are faster to read than its columns."""
    return len(x) <= VECTORS and w.size > LARGE and _steps(x)[1] == _steps(w)[1] == 4


def _shares(program: Program, w: Array) -> int:
    """Pieces of a matrix that is read once: a thread that is late has fewer of them."""
    return max(program.threads, min(SHARES * program.threads, w.size // SHARE))


def _steps(x: Array) -> tuple[int, int]:
    found = steps(x)
    assert found is not None  # after `factor`
    return found


def emit_sums(name: str, several: Sequence[Sums]) -> None:
    """What `emit_parts` has left to do."""
    for y, parts, b in several:
        sizes = y.size, parts.shape[0], int(b is not None), y.shape[1]
        ins = [parts] if b is None else [parts, contiguous(b)]
        pieces = y.program.pieces(parts.size)
        y.program.emit(f"{name} sums", _run_sums, [y], ins, Native(add_parts, sizes, pieces))


def _running(n_pairs: int) -> Callable[..., None]:
    """The instruction of so many pairs on NumPy's arrays."""

    def run(y: Any, *ins: Any) -> None:
        np.matmul(ins[0], ins[1], out=y)
        for i in range(2, 2 * n_pairs, 2):
            y += ins[i] @ ins[i + 1]
        for b in ins[2 * n_pairs :]:
            y += b

    return run


def _run_parts(parts: Any, x: Any, w: Any) -> None:
    for i, own in enumerate(parts):
        start, stop = part.py_func(len(w), i, len(parts), LINE)
        np.matmul(x[:, start:stop], w[start:stop], out=own)


def _run_sums(y: Any, parts: Any, b: Any = None) -> None:
    np.sum(parts, axis=0, out=y)
    if b is not None:
        y += b


@rowwise
def product(memory: int, x: Any, w: Any, keep: bool, y: Any, sizes: Any) -> None:
    """y = x w, or += that. x, w: (address, down, across) as `steps` has them; y: (address, down).

    sizes: N, M, K of x (N, K), w (K, M), y (N, M). memory: the thread's, as kernels have it.
    """
    (x_at, x_down, x_across), (w_at, w_down, w_across), (y_at, y_down) = x, w, y
    n, m, k = sizes
    if n <= 0 or m <= 0:
        return
    own = words(memory, 3)
    w_by_rows = w_across == 4 and w_down >= 4 * m
    if k == 0:
        for i in range(0 if keep else n):
            float32s(y_at + i * y_down, (m,))[:] = ZERO
    elif n <= VECTORS and x_across == 4 and not keep:
        for i in range(n):
            row, out = float32s(x_at + i * x_down, (k,)), float32s(y_at + i * y_down, (m,))
            if w_by_rows:
                vector_matrix(row, w_at, w_down // 4, out)
            else:
                matrix_vector(w_at, w_across // 4, row, out)
    elif own[TILES] and (not w_by_rows or n * m * k > ALONE):
        factors = x_at, x_down, x_across, w_at, w_down, w_across
        call(own[TILES], (own[SCRATCH], ONE, *factors, np.int64(keep), y_at, y_down, n, m, k))
    else:
        x_by_rows = x_across == 4 and x_down >= 4 * k
        orders = ROW_MAJOR, _order(x_by_rows), _order(w_by_rows)
        x_step = x_down // 4 if x_by_rows else x_across // 4
        w_step = w_down // 4 if w_by_rows else w_across // 4
        kept = ONE if keep else ZERO
        call(
            own[SGEMM],
            (*orders, n, m, k, ONE, x_at, x_step, w_at, w_step, kept, y_at, y_down // 4),
        )


@rowwise
def _order(by_rows: bool) -> Any:
    return AS_IT_IS if by_rows else TRANSPOSED


@rowwise
def add_bias(b: int, y: Any, sizes: Any) -> None:
    """Add b (M) to each row of y (N, M), in place.

    b: its address   y: (its address, the bytes from one row to the next)   sizes: (N, M)
    """
    n, m = sizes
    own = float32s(b, (m,))
    for i in range(n):
        row = float32s(y[0] + i * y[1], (m,))
        for j in range(m):
            row[j] += own[j]


@rowwise
def copy_rows(x: int, down: int, y: Any, sizes: Any) -> None:
    """y = x, where the plan has not put them in one place."""
    n, m = sizes
    for i in range(n if x != y[0] else 0):
        row, own = float32s(y[0] + i * y[1], (m,)), float32s(x + i * down, (m,))
        for j in range(m):
            row[j] = own[j]


@native
def products(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; x and w of each pair, b where there is one.

    N, M, whether pieces are rows, what b is, how many pairs, and of each K, bytes from row to row
    and from column to column of x, and of w.
    """
    a = numbers(args, 5)
    n, m, by_rows, added, n_pairs = a[0], a[1], a[2], a[3], a[4]
    at, layouts = words(args, 2 + 2 * n_pairs), numbers(args, 5 + 5 * n_pairs)[5:]
    top, bottom, left, right = np.int64(0), n, np.int64(0), m
    if by_rows:
        top, bottom = part(n, piece, pieces, HIGH if n > 4 * HIGH else 1)
    else:
        left, right = part(m, piece, pieces, COLUMNS if m > 2 * COLUMNS else LINE)
    if top >= bottom or left >= right:
        return
    first = 4 * (top * m + left)
    y, sizes = (at[0] + first, 4 * m), (bottom - top, right - left)
    if added == WHOLE:
        copy_rows(at[1 + 2 * n_pairs] + first, 4 * m, y, sizes)
    for i in range(n_pairs):
        k, x_down, x_across = layouts[5 * i], layouts[5 * i + 1], layouts[5 * i + 2]
        w_down, w_across = layouts[5 * i + 3], layouts[5 * i + 4]
        x = at[1 + 2 * i] + top * x_down, x_down, x_across
        w = at[2 + 2 * i] + left * w_across, w_down, w_across
        product(memory, x, w, i > 0 or added == WHOLE, y, (*sizes, k))
    if added == ROW:
        add_bias(at[1 + 2 * n_pairs] + 4 * left, y, sizes)


@native
def vectors(args: int, piece: int, pieces: int, memory: int) -> None:
    """parts (pieces, N, M); x, w, both of contiguous rows, N, M, K, bytes from row to row."""
    a = words(args, 8)
    n, m, k, x_down, w_down = a[3], a[4], a[5], a[6], a[7]
    start, stop = part(k, piece, pieces, LINE)
    for i in range(n):
        out = float32s(a[0] + 4 * (piece * n + i) * m, (m,))
        row = float32s(a[1] + i * x_down + 4 * start, (max(stop - start, 0),))
        vector_matrix(row, a[2] + start * w_down, w_down // 4, out)


@native
def add_parts(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; parts, b where there is one, how many numbers, parts, whether there is b, its size."""
    a = numbers(args, 4)
    at, size, n_parts, has_b, width = words(args, 3), a[0], a[1], a[2], a[3]
    start, stop = part(size, piece, pieces, LINE)
    n = max(stop - start, 0)
    y = float32s(at[0] + 4 * start, (n,))
    y[:] = ZERO
    for p in range(n_parts):
        own = float32s(at[1] + 4 * (p * size + start), (n,))
        for j in range(n):
            y[j] += own[j]
    if has_b:
        b = float32s(at[2], (width,))
        for j in range(n):
            y[j] += b[(start + j) % width]


@native
def sum_rows(args: int, piece: int, pieces: int, memory: int) -> None:
    """out (M,) = sums of rows, + b; x, b where there is one, N, M, whether there is b."""
    at, a = words(args, 3), numbers(args, 3)
    n, m, has_b = a[0], a[1], a[2]
    start, stop = part(m, piece, pieces, LINE)
    if start >= stop:
        return
    size = (stop - start,)
    out, few = float32s(at[0] + 4 * start, size), np.zeros(stop - start, np.float32)
    if has_b:
        copy_rows(at[2] + 4 * start, 0, (at[0] + 4 * start, 0), (1, stop - start))
    else:
        out[:] = ZERO
    for i in range(n):
        row = float32s(at[1] + 4 * (i * m + start), size)
        for j in range(stop - start):
            few[j] += row[j]
        if i % FEW == FEW - 1 or i == n - 1:  # sums of such sums are more exact
            for j in range(stop - start):
                out[j] += few[j]
            few[:] = ZERO
