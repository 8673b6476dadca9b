"""Matrix products cut into pieces, for `threads.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from xformer.backends.numpy.threads import n_threads, scratch
from xformer.dispatch import chosen_kernels
from xformer.typing import Array

SMALL = 1 << 18  # multiplications: not worth waking a thread for, nor does OpenBLAS, for matrices
VECTOR = 1 << 13  # the same of a vector and a matrix, for OpenBLAS
FEW = 128  # rows, at most, for which `worth_threads` decides within inference()
# A thread is awake after 50 us or more. It is worth waking for a product whose weights, times the
# rows and what reading the weights takes, are more: one of 0.4 ms.
READ, WORTH = 20, 20_000_000
AS_IT_IS, TRANSPOSED = 111, 112  # of CBLAS
LARGEST = 2**31 - 1
PIECE = 1536  # rows or columns, at most: fewer pack the other factor more often


def product(
    x: Array,
    w: Array,
    y: Array,
    b: Array | None = None,
    *,
    add: bool = False,
    step: int | None = None,
) -> list[Callable[[], None]]:
    """Pieces of y[...] = x w + b, or with `add` of y += x w, independent of each other.

    x: (N, I)   w: (I, O)   b: (O,) or None   y: (N, O). Rows of y or columns, whichever are more:
    `step` of them, unless given by the number of threads, on which the last bit may then depend.
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
    """As `product`, of the sum of all x w."""
    n, m = y.shape
    multiply = chosen()
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
    """Whether several threads pay for a product of n rows, at most `FEW`, and so many weights."""
    return size * (READ + n) > WORTH


def wakes_blas(n: int, size: int) -> bool:
    """Whether BLAS would wake its threads for it."""
    return n * size > (SMALL if n > 1 else VECTOR)


def by_numpy(x: Array, w: Array, out: Array, *, add: bool = False) -> None:
    """out = x w, or out += x w, on this thread."""
    if add:
        out += np.matmul(x, w, out=scratch("product", out.shape, out.dtype))
    else:
        np.matmul(x, w, out=out)


# As `by_numpy`, of kernels that have another; `mkl` puts its own here.
MULTIPLY: dict[str, Callable[..., None]] = {}


def chosen() -> Callable[..., None]:
    """The product of the kernels that run here (`xformer.kernels`)."""
    return MULTIPLY.get(chosen_kernels(), by_numpy)


def layout(a: Array) -> tuple[int, int] | None:
    """Whether rows or columns are contiguous, and from one to the next; None: neither, or a vector.

    NumPy takes vectors by another routine, which is faster.
    """
    if min(a.shape) < 2 or max(*a.shape, *(stride // a.itemsize for stride in a.strides)) > LARGEST:
        return None
    return leading(a)


def leading(a: Array) -> tuple[int, int] | None:
    """Whether rows or columns are contiguous, and the leading dimension; None: neither.

    The stride of an axis of length 1 may be any number.
    """
    (n, m), (down, across), size = a.shape, a.strides, a.itemsize
    if (m == 1 or across == size) and (n == 1 or (down >= m * size and down % size == 0)):
        return AS_IT_IS, m if n == 1 else down // size
    if (n == 1 or down == size) and (m == 1 or (across >= n * size and across % size == 0)):
        return TRANSPOSED, n if m == 1 else across // size
    return None


def _step(length: int, size: int) -> int:
    """The length of a piece: as many for each thread as for the others."""
    threads = n_threads()
    if size <= SMALL or threads == 1:
        return max(length, 1)
    n_pieces = threads * -(-length // (threads * PIECE))
    return -(-length // n_pieces)
