"""`embedding`: forward copies rows of the table; backward is the kernel of `index_add`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.flash_rows import copy
from xformer.backends.numba.kernels.index_add import emit_sums
from xformer.backends.numba.kernels.layout import program_of
from xformer.backends.numba.program import program
from xformer.backends.numba.program.namespace import contiguous, reshape
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_ids, require_shape


def unsupported(table: Array, *, ids: Array) -> str | None:
    """Return why the numba kernel of `embedding` cannot run, or None if it can.

    It needs a float32 table. Table and ids must not both be constants of the program.
    """
    if table.dtype != np.float32:
        return "only float32"
    return None if program.of([table, ids]) else "all arrays are constants"


@kernel(ops.embedding, "numba.kernels", unsupported=unsupported)
def embedding(table: Array, *, ids: Array) -> tuple[Array, NumbaEmbeddingCache]:
    """y = table[ids]."""
    ids = require_ids("embedding", "ids", ids, table.shape[0], table)
    recorder = program.of([table, ids])
    assert recorder is not None  # `unsupported` has checked this
    flat, (n_rows, width) = contiguous(reshape(ids, (ids.size,))), table.shape
    y = recorder.fresh((*ids.shape, width), np.float32)

    def run(y: Any, table: Any, ids: Any) -> None:
        np.take(table, ids, axis=0, out=y.reshape(len(ids), width))

    compiled = Native(take_rows, (ids.size, n_rows, width), recorder.pieces(y.size))
    recorder.emit("embedding", run, [y], [contiguous(table), flat], compiled)
    return y, NumbaEmbeddingCache(ids, table.shape)


@short
class NumbaEmbeddingCache(NamedTuple):
    """Saved by `embedding` for backward: no copy of the table."""

    ids: Array  # (...)
    table_shape: tuple[int, ...]  # (V, D)

    def backward(self, dy: Array) -> Array:
        """dtable = zeros with dy added at the rows `ids`; gradients of repeated ids are summed."""
        ids, table_shape = self
        require_shape("embedding", "dy", dy, (*ids.shape, table_shape[1]))
        rows, flat = reshape(dy, (ids.size, table_shape[1])), reshape(ids, (ids.size,))
        if dy.dtype != np.float32:
            raise TypeError(f"embedding: dy must be float32 as the table, got {dy.dtype}")
        return emit_sums(program_of(ids, dy), "embedding backward", table_shape, rows, flat)


@native
def take_rows(args: int, piece: int, pieces: int, memory: int) -> None:
    """Copy a piece of the rows y[i] = table[ids[i]]; the row is 0 if an id is out of range.

    outputs: y (N, D); inputs: table (V, D), ids (N,) int64. integers: N, V, D.
    The ids were checked, but the caller may change their array during a run.
    """
    a = words(args, 6)
    n, n_rows, width = a[3], a[4], a[5]
    ids = words(a[2], n)
    start, stop = part(n, piece, pieces, 1)
    for i in range(start, stop):
        row = float32s(a[0] + 4 * i * width, (width,))
        index = ids[i]  # read once: the bounds check must be of the value that is used
        if 0 <= index < n_rows:
            copy(float32s(a[1] + 4 * index * width, (width,)), row)
        else:
            row[:] = np.float32(0)
