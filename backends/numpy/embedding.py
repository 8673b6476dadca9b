"""`embedding` whose backward writes only to the rows of the table that the ids select."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from xformer.backends.numpy.ids import private_copy
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_ids, require_shape
from xformer.ops.embedding import embedding as reference


@kernel(reference, "numpy")
def embedding(table: Array, *, ids: Array) -> tuple[Array, NumpyEmbeddingCache]:
    """y = table[ids]."""
    ids = require_ids("embedding", "ids", private_copy(ids), table.shape[0], table)
    return np.take(table, ids, axis=0), NumpyEmbeddingCache(ids, table.shape)


@short
class NumpyEmbeddingCache(NamedTuple):
    """Saved by `embedding` for backward: the ids. The gradient does not depend on the table."""

    ids: Array  # (...)
    table_shape: tuple[int, int]  # (V, D)

    def backward(self, dy: Array) -> Array:
        """dtable = zeros with dy added at the rows ids. Other rows are never touched in memory."""
        require_shape("embedding", "dy", dy, (*self.ids.shape, self.table_shape[1]))
        from xformer.backends.numpy.index_add import add_rows

        dtable = np.zeros(self.table_shape, dy.dtype)
        add_rows(dtable, dy.reshape(math.prod(self.ids.shape), dy.shape[-1]), self.ids.reshape(-1))
        return dtable
