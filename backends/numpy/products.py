"""Matrix products cut into pieces, for `threads.run`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from xformer.backends.numpy.threads import n_threads

from xformer.typing import Array

SMALL = 1 << 18  # multiplications: not worth waking a thread for; OpenBLAS itself wakes none
PIECE = 768  # rows or columns, at most: y of it is still in the cache when its bias comes


def product(x: Array, w: Array, y: Array, b: Array | None = None) -> list[Callable[[], None]]:
    """Pieces of y[...] = x w + b, independent of each other.

    x: (N, I)   w: (I, O)   b: (O,) or None   y: (N, O). Rows of y or columns, whichever are more.
    """
    n, m = y.shape
    step = _step(max(n, m), n * m * x.shape[1])

    def rows(at: slice) -> None:
        np.matmul(x[at], w, out=y[at])
        if b is not None:
            y[at] += b

    def columns(at: slice) -> None:
        np.matmul(x, w[:, at], out=y[:, at])
        if b is not None:
            y[:, at] += b[at]

    piece = rows if n >= m else columns
    return [_of(piece, start, start + step) for start in range(0, max(n, m), step)]


def _of(piece: Callable[[slice], None], start: int, stop: int) -> Callable[[], None]:
    return lambda: piece(slice(start, stop))


def _step(length: int, size: int) -> int:
    """The length of a piece: as many for each thread as for the others."""
    threads = n_threads()
    if size <= SMALL or threads == 1:
        return max(length, 1)
    n_pieces = threads * -(-length // (threads * PIECE))
    return -(-length // n_pieces)
