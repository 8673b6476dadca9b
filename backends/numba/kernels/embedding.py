"""`embedding`: forward copies rows of the table; backward is the kernel of `index_add`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.flash_rows import copy
from xformer.backends.numba.kernels.index_add import emit_sums
from xformer.backends.numba.kernels.layout import record, recorded
from xformer.backends.numba.program.copies import reshape
from xformer.backends.numba.program.declared import declared
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_ids, require_shape


@recorded(ops.embedding)
def embedding(table: Array, *, ids: Array) -> tuple[Array, NumbaEmbeddingCache]:
    """y = table[ids]."""
    ids = require_ids("embedding", "ids", ids, table.shape[0], table)
    flat = reshape(ids, (ids.size,))
    (y,) = record(take_rows, "embedding", table, flat, shapes={"N": ids.shape})
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
        return emit_sums("embedding backward", table_shape, rows, flat)


@declared("y (N, D) <- table (V, D), ids (N) int64")
def take_rows(y: Any, table: Any, ids: Any) -> None:
    """Copy the rows y[i] = table[ids[i]]; the row is 0 if an id is out of range.

    The ids were checked, but the caller may change their array during a run.
    """
    for i in range(len(ids)):
        index = ids[i]  # read once: the bounds check must be of the value that is used
        if 0 <= index < len(table):
            copy(table[index], y[i])
        else:
            y[i] = np.float32(0)
