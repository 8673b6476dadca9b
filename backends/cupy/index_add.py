"""`index_add`, by atomic additions or in sorted order. `embedding`'s backward uses it too.

with deterministic():
    grads = cache.backward()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from xformer.backends.cupy.module import EVERY, Source, blocks, contiguous, launch
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_ids
from xformer.ops.index_add import IndexAddCache
from xformer.ops.index_add import index_add as reference

SOURCE = Source(__file__, dtypes=EVERY)
BLOCK = 256  # threads

_deterministic: ContextVar[bool] = ContextVar("deterministic", default=False)


@contextmanager
def deterministic() -> Iterator[None]:
    """Return a context that sums over repeated ids in a fixed order, which takes longer."""
    token = _deterministic.set(True)
    try:
        yield
    finally:
        _deterministic.reset(token)


def is_deterministic() -> bool:
    """Return whether `deterministic` is active."""
    return _deterministic.get()


@kernel(reference, "cupy")
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    """Return (out, cache): a copy of x (V, D) with out[ids[n]] += y[n] for every n.

    y: (N, D)   ids: (N,), integers
    """
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    out = x.copy() if x.flags.c_contiguous else contiguous(x)
    add_rows(out, y, ids)
    return out, IndexAddCache(ids, x.shape)


def add_rows(out: Array, y: Array, ids: Array) -> None:
    """Add out[ids[n]] += y[n] in place for every n. A row whose id is not in [0, V) is skipped.

    out: (V, D), contiguous
    y: (N, D), of the dtype of `out`, or of two bytes if `out` is float32
    ids: (N,)
    """
    xp = array_namespace(out)
    ids = contiguous(xp.astype(ids, xp.int64, copy=False))
    rows, width = y.shape
    size = y.dtype.itemsize
    if y.strides[1] != size:
        y = contiguous(y)
    shape = rows, width, y.strides[0] // size, out.shape[0]
    if is_deterministic():
        order = xp.argsort(ids, stable=True)
        _launch(
            "add_sorted",
            y,
            (rows, blocks(width, BLOCK)),
            (y, xp.take(ids, order), order, out, *shape),
        )
    else:
        _launch("add_rows", y, (blocks(rows * width, BLOCK),), (y, ids, out, *shape))


def _launch(name: str, like: Array, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    launch(SOURCE, name, like, grid=grid, block=(BLOCK,), args=args)
