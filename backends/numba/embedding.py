"""`embedding` whose backward adds row after row, each thread its columns: nothing is sorted."""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.compiled import BLOCK, PLAIN, rowwise
from xformer.backends.numpy import embedding as numpys
from xformer.backends.numpy.ids import private
from xformer.backends.numpy.threads import blocks

from xformer.checks import require_ids, require_shape
from xformer.typing import Array

COLUMNS = 16  # of a piece, or a little fewer: a line of memory


def not_float32(table: Array, *, ids: Array) -> str | None:
    """Why the kernel cannot run."""
    return None if table.dtype == np.float32 else "only float32"


def embedding(table: Array, *, ids: Array) -> tuple[Array, EmbeddingCache]:
    """y = table[ids]."""
    y, cache = numpys.embedding(table, ids=ids)
    return y, EmbeddingCache(*cache)


class EmbeddingCache(numpys.EmbeddingCache):
    """What `embedding` keeps for its backward, as NumPy's kernel does."""

    def backward(self, dy: Array) -> Array:
        """dtable = zeros with dy added at the rows ids; memory of the others is never touched."""
        width = self.table_shape[1]
        require_shape("embedding", "dy", dy, (*self.ids.shape, width))
        if dy.dtype != np.float32:
            return super().backward(dy)
        # Again: where they have been written over since, rows outside the table would be.
        ids = require_ids("embedding", "ids", private(self.ids), self.table_shape[0], dy)
        ids = np.require(ids.reshape(-1), None, PLAIN)
        dtable = np.zeros(self.table_shape, np.float32)
        rows = np.require(dy.reshape(len(ids), width), None, PLAIN)

        def piece(start: int, stop: int) -> None:
            _add_rows(ids, rows, start, stop, dtable)

        blocks(piece, width, max(COLUMNS, BLOCK // max(len(ids), 1)))
        return dtable


@rowwise
def _add_rows(ids: Any, y: Any, start: int, stop: int, out: Any) -> None:
    """out[ids[n]] += y[n] for every n, of these columns."""
    for n in range(len(ids)):
        row = out[ids[n]]
        for j in range(start, stop):
            row[j] += y[n, j]
