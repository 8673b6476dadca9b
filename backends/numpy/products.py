"""Matrix products cut into pieces, for `threads.run`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from xformer.backends.numpy.threads import n_threads, scratch

from xformer.typing import Array

SMALL = 1 << 18  # multiplications: not worth waking a thread for, nor does OpenBLAS, for matrices
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
    n, m = y.shape
    step = _step(max(n, m), n * m * x.shape[1]) if step is None else step
    into = _added if add else np.matmul

    def rows(at: slice) -> None:
        into(x[at], w, out=y[at])
        if b is not None:
            y[at] += b

    def columns(at: slice) -> None:
        into(x, w[:, at], out=y[:, at])
        if b is not None:
            y[:, at] += b[at]

    piece = rows if n >= m else columns
    return [_of(piece, start, start + step) for start in range(0, max(n, m), step)]


def _of(piece: Callable[[slice], None], start: int, stop: int) -> Callable[[], None]:
    return lambda: piece(slice(start, stop))


def _added(x: Array, w: Array, out: Array) -> None:
    part = np.matmul(x, w, out=scratch("product", out.shape, out.dtype))
    np.add(out, part, out=out)


def _step(length: int, size: int) -> int:
    """The length of a piece: as many for each thread as for the others."""
    threads = n_threads()
    if size <= SMALL or threads == 1:
        return max(length, 1)
    n_pieces = threads * -(-length // (threads * PIECE))
    return -(-length // n_pieces)
