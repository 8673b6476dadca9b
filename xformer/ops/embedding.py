"""Embedding: rows of a table, looked up by id."""

from __future__ import annotations

import math
from typing import NamedTuple

from array_api_compat import device

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_ids, require_shape
from xformer.dispatch.shapes import shapes


@overridable
@shapes("table (V, D)")
def embedding(table: Array, *, ids: Array) -> tuple[Array, EmbeddingCache]:
    """y = table[ids].

    table: (V, D)   ids: (...) integers in [0, V)   y: (..., D)
    TypeError if ids are not integers, ValueError if one is out of range.
    Derivation: docs/derivations/embedding.md
    """
    ids = require_ids("embedding", "ids", ids, table.shape[0], table)
    xp = array_namespace(table)
    y = xp.take(table, _flat(ids), axis=0)  # (N, D)
    return xp.reshape(y, (*ids.shape, table.shape[1])), EmbeddingCache(ids, table.shape)


@short
class EmbeddingCache(NamedTuple):
    """Saved by `embedding` for backward: no copy of the table."""

    ids: Array  # (...)
    table_shape: tuple[int, int]  # (V, D)

    def backward(self, dy: Array) -> Array:
        """dtable = zeros, with dy added to the rows `ids`. Gradients of repeated ids are summed."""
        require_shape("embedding", "dy", dy, (*self.ids.shape, self.table_shape[1]))
        xp = array_namespace(dy)
        ids = _flat(self.ids)  # (N,)
        zeros = xp.zeros(self.table_shape, dtype=dy.dtype, device=device(dy))
        rows = xp.reshape(dy, (ids.shape[0], self.table_shape[1]))
        return ops.index_add(zeros, rows, ids=ids)[0]


def _flat(ids: Array) -> Array:
    return array_namespace(ids).reshape(ids, (math.prod(ids.shape),))
