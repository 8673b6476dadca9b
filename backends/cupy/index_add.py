"""`index_add`, and `embedding`, whose gradient it is: by atomic additions, or sorted.

with deterministic():
    grads = cache.backward()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from array_api_compat import array_namespace
from xformer.backends.cupy.module import Source, blocks, contiguous, launch

from xformer.checks import require_ids, require_shape
from xformer.dispatch import kernel
from xformer.ops.embedding import embedding as embedding_reference
from xformer.ops.index_add import IndexAddCache
from xformer.ops.index_add import index_add as reference
from xformer.typing import Array

SOURCE = Source(__file__)
BLOCK = 256  # threads

_deterministic: ContextVar[bool] = ContextVar("deterministic", default=False)


@contextmanager
def deterministic() -> Iterator[None]:
    """Within this context sums over repeated ids are made in a fixed order, which takes longer."""
    token = _deterministic.set(True)
    try:
        yield
    finally:
        _deterministic.reset(token)


@kernel(reference, "cupy")
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    """out = x, then out[ids[n]] += y[n] for every n."""
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    out = x.copy() if x.flags.c_contiguous else contiguous(x)
    add_rows(out, y, ids)
    return out, IndexAddCache(ids, x.shape)


@kernel(embedding_reference, "cupy")
def embedding(table: Array, *, ids: Array) -> tuple[Array, EmbeddingCache]:
    """y = table[ids]."""
    ids = require_ids("embedding", "ids", ids, table.shape[0], table)
    xp = array_namespace(table)
    y = xp.take(table, xp.reshape(ids, (ids.size,)), axis=0)  # (N, D)
    return xp.reshape(y, (*ids.shape, table.shape[1])), EmbeddingCache(ids, table.shape)


class EmbeddingCache(NamedTuple):
    """What `embedding` keeps for its backward: no copy of the table."""

    ids: Array  # (...)
    table_shape: tuple[int, int]  # (V, D)

    def backward(self, dy: Array) -> Array:
        """dtable = zeros with dy added at the rows ids, with no copy of the zeros."""
        require_shape("embedding", "dy", dy, (*self.ids.shape, self.table_shape[1]))
        xp = array_namespace(dy)
        dtable = xp.zeros(self.table_shape, dtype=dy.dtype, device=dy.device)
        n = self.ids.size
        rows = xp.reshape(dy, (n, self.table_shape[1]))
        add_rows(dtable, rows, xp.reshape(self.ids, (n,)))
        return dtable


def add_rows(out: Array, y: Array, ids: Array) -> None:
    """out[ids[n]] += y[n] in place; out (V, D) contiguous, y (N, D), ids (N,) in [0, V)."""
    xp = array_namespace(out)
    ids = contiguous(xp.astype(ids, xp.int64, copy=False))
    rows, width = y.shape
    size = y.dtype.itemsize
    if y.strides[1] != size:
        y = contiguous(y)
    shape = rows, width, y.strides[0] // size
    if _deterministic.get():
        order = xp.argsort(ids, stable=True)
        _launch(
            "add_sorted",
            out,
            (rows, blocks(width, BLOCK)),
            (y, xp.take(ids, order), order, out, *shape),
        )
    else:
        _launch("add_rows", out, (blocks(rows * width, BLOCK),), (y, ids, out, *shape))


def _launch(name: str, like: Array, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    launch(SOURCE, name, like, grid=grid, block=(BLOCK,), args=args)
