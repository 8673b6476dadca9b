"""Matrix products cut into pieces of rows or columns, for `threads.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from xformer.backends.numpy.threads import n_threads, scratch
from xformer.base.typing import Array
from xformer.dispatch import chosen_kernels

SMALL = 1 << 18  # multiplications; a smaller product uses one thread, as in OpenBLAS
VECTOR = 1 << 13  # multiplications; OpenBLAS computes a smaller matrix-vector product on one thread
FEW = 128  # rows; up to this many, `worth_threads` decides within inference()
# Waking a thread takes 50 us or more. That pays for products of 0.4 ms or more, whose weights times
# (rows + READ) exceed WORTH. READ is the cost of reading a weight, in multiplications.
READ, WORTH = 20, 20_000_000
AS_IT_IS, TRANSPOSED = 111, 112  # CblasNoTrans, CblasTrans
LARGEST = 2**31 - 1  # CBLAS counts in int32
# Rows or columns of a piece, at most. With fewer, the other factor is packed more often.
PIECE = 1536


def product(
    x: Array,
    w: Array,
    y: Array,
    b: Array | None = None,
    *,
    add: bool = False,
    step: int | None = None,
) -> list[Callable[[], None]]:
    """Return functions that together compute y[...] = x w + b, or y += x w + b if `add`.

    x: (N, I)   w: (I, O)   b: (O,) or None   y: (N, O)
    step: rows of each function, or columns if y has more columns than rows. None: it depends on the
        number of threads, and so may the last bits of y.

    The functions are independent: they can run on several threads.
    """
    return products([(x, w)], y, b, add=add, step=step)


def products(
    factors: Sequence[tuple[Array, Array]],
    y: Array,
    b: Array | None = None,
    *,
    add: bool = False,
    step: int | None = None,
) -> list[Callable[[], None]]:
    """Return functions that together compute y[...] = b + the sum of x w over the pairs (x, w).

    factors: pairs x (N, I), w (I, O); I may differ   y: (N, O)   b: (O,) or None
    add: add the sum to y, instead of overwriting y
    step: as in `product`
    """
    n, m = y.shape
    multiply = chosen_product()
    if step is None:
        step = _step(max(n, m), n * m * sum(x.shape[1] for x, _ in factors))

    def piece(rows: slice, columns: slice) -> None:
        out = y[rows, columns]
        for i, (x, w) in enumerate(factors):
            multiply(x[rows], w[:, columns], out, add=add or i > 0)
        if b is not None:
            out += b[columns]

    parts = [slice(start, start + step) for start in range(0, max(n, m), step)]
    every = slice(None)
    return [partial(piece, *((part, every) if n >= m else (every, part))) for part in parts]


def worth_threads(n: int, size: int) -> bool:
    """Return whether several threads pay for a product of n <= FEW rows and `size` weights."""
    return size * (READ + n) > WORTH


def wakes_blas(n: int, size: int) -> bool:
    """Return whether BLAS would use several threads for a product of n rows and `size` weights."""
    return n * size > (SMALL if n > 1 else VECTOR)


def by_numpy(x: Array, w: Array, out: Array, *, add: bool = False) -> None:
    """Compute out[...] = x w, or out += x w if `add`, on this thread."""
    if add:
        out += np.matmul(x, w, out=scratch("product", out.shape, out.dtype))
    else:
        np.matmul(x, w, out=out)


# Functions in place of `by_numpy`, by the name of kernels that have one: "mkl".
MULTIPLY: dict[str, Callable[..., None]] = {}


def chosen_product() -> Callable[..., None]:
    """Return `by_numpy`, or the function that the chosen kernels use instead of it."""
    return MULTIPLY.get(chosen_kernels(), by_numpy)


def layout(a: Array) -> tuple[int, int] | None:
    """Return how BLAS can read matrix `a`, as `leading` does; None if it cannot, or for a vector.

    NumPy computes products with vectors by a faster routine.
    """
    if min(a.shape) < 2 or max(*a.shape, *(stride // a.itemsize for stride in a.strides)) > LARGEST:
        return None
    return leading(a)


def leading(a: Array) -> tuple[int, int] | None:
    """Return AS_IT_IS if rows of `a` are contiguous, TRANSPOSED if columns are, and the stride.

    The stride between rows, or between columns, is in elements: the leading dimension of BLAS.
    None if neither is contiguous. NumPy may give an axis of length 1 any stride.
    """
    (n, m), (row_stride, column_stride), size = a.shape, a.strides, a.itemsize
    if (m == 1 or column_stride == size) and (
        n == 1 or (row_stride >= m * size and row_stride % size == 0)
    ):
        return AS_IT_IS, m if n == 1 else row_stride // size
    if (n == 1 or row_stride == size) and (
        m == 1 or (column_stride >= n * size and column_stride % size == 0)
    ):
        return TRANSPOSED, n if m == 1 else column_stride // size
    return None


def _step(length: int, size: int) -> int:
    """Return the length of a piece, so that each thread gets equally many pieces.

    length: rows or columns to cut   size: multiplications of the whole product
    """
    threads = n_threads()
    if size <= SMALL or threads == 1:
        return max(length, 1)
    n_pieces = threads * -(-length // (threads * PIECE))
    return -(-length // n_pieces)
