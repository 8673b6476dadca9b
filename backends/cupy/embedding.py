"""`embedding`: one launch copies the rows. `index_add` computes the gradient."""

from __future__ import annotations

from typing import NamedTuple

from xformer.backends.cupy.index_add import add_rows
from xformer.backends.cupy.module import EVERY, Source, blocks, contiguous, empty, launch, wide
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_ids, require_shape
from xformer.dispatch.shapes import STORED, working_dtype
from xformer.ops.embedding import embedding as reference

SOURCE = Source(__file__, dtypes=EVERY, WIDE=(0, 1))
BLOCK = 256  # threads; each copies one pack of elements


@kernel(reference, "cupy", storage_dtypes=STORED)
def embedding(table: Array, *, ids: Array) -> tuple[Array, CupyEmbeddingCache]:
    """Return (y = table[ids], cache). The row of an id out of range is NaN.

    table: (V, D)
    ids: (...), integers
    """
    ids = contiguous(require_ids("embedding", "ids", ids, table.shape[0], table))
    table = contiguous(table)
    n_rows, width = table.shape
    y = empty(table, (*ids.shape, width))
    vec = wide(width, table, y)
    launch(
        SOURCE,
        "embedding_forward",
        table,
        grid=(blocks(y.size, BLOCK * (16 // table.dtype.itemsize if vec else 1)),),
        block=(BLOCK,),
        args=(table, ids, y, y.size, width, n_rows),
        WIDE=vec,
    )
    return y, CupyEmbeddingCache(ids, (n_rows, width))


@short
class CupyEmbeddingCache(NamedTuple):
    """Saved by `embedding` for backward: the ids, but not the table."""

    ids: Array  # (...)
    table_shape: tuple[int, int]  # (V, D)

    def backward(self, dy: Array) -> Array:
        """Return dtable (V, D): zeros, with the rows of dy (..., D) added in place at ids."""
        require_shape("embedding", "dy", dy, (*self.ids.shape, self.table_shape[1]))
        xp = array_namespace(dy)
        dtable = xp.zeros(self.table_shape, dtype=working_dtype(dy), device=dy.device)
        n = self.ids.size
        rows = xp.reshape(dy, (n, self.table_shape[1]))
        add_rows(dtable, rows, xp.reshape(self.ids, (n,)))
        return dtable
