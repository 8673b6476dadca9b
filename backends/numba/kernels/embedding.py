"""`embedding`: rows are copied, and their gradients added as `index_add` does it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.kernels.index_add import emit_sums
from xformer.backends.numba.kernels.layout import program_of
from xformer.backends.numba.program import program
from xformer.backends.numba.program.namespace import contiguous, reshape
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.checks import require_ids, require_shape
from xformer.dispatch import kernel
from xformer.showing import short
from xformer.typing import Array


def unsupported(table: Array, *, ids: Array) -> str | None:
    """Why the kernel cannot run."""
    if table.dtype != np.float32:
        return "only float32"
    return None if program.of([table, ids]) else "all arrays are constants"


@kernel(ops.embedding, "numba.kernels", unsupported=unsupported)
def embedding(table: Array, *, ids: Array) -> tuple[Array, EmbeddingCache]:
    """y = table[ids]."""
    ids = require_ids("embedding", "ids", ids, table.shape[0], table)
    recorder = program.of([table, ids])
    assert recorder is not None  # else this were unsupported
    flat, (n_rows, width) = contiguous(reshape(ids, (ids.size,))), table.shape
    y = recorder.fresh((*ids.shape, width), np.float32)

    def run(y: Any, table: Any, ids: Any) -> None:
        np.take(table, ids, axis=0, out=y.reshape(len(ids), width))

    own = Native(take_rows, (ids.size, n_rows, width), recorder.pieces(y.size))
    recorder.emit("embedding", run, [y], [contiguous(table), flat], own)
    return y, EmbeddingCache(ids, table.shape)


@short
class EmbeddingCache(NamedTuple):
    """Saved by `embedding` for backward: no copy of the table."""

    ids: Array  # (...)
    table_shape: tuple[int, ...]  # (V, D)

    def backward(self, dy: Array) -> Array:
        """dtable = zeros with dy added at the rows ids; the gradients of repeated ids sum."""
        ids, table_shape = self
        require_shape("embedding", "dy", dy, (*ids.shape, table_shape[1]))
        rows, flat = reshape(dy, (ids.size, table_shape[1])), reshape(ids, (ids.size,))
        if dy.dtype != np.float32:
            raise TypeError(f"embedding: dy must be float32 as the table, got {dy.dtype}")
        return emit_sums(program_of(ids, dy), "embedding backward", table_shape, rows, flat)


@native
def take_rows(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; table, ids, N, V, D. Ids were checked, but lie where others may write."""
    a = words(args, 6)
    n, n_rows, width = a[3], a[4], a[5]
    ids = words(a[2], n)
    start, stop = part(n, piece, pieces, 1)
    for i in range(start, stop):
        row = float32s(a[0] + 4 * i * width, (width,))
        number = ids[i]  # read once: it is this one that was looked at
        if 0 <= number < n_rows:
            row[:] = float32s(a[1] + 4 * number * width, (width,))
        else:
            row[:] = np.float32(0)
