"""`index_add` by sorted segments: one pass instead of the reference's log2(N)."""

from __future__ import annotations

import numpy as np

from xformer.backends.numpy.ids import private_copy
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_ids
from xformer.ops.index_add import IndexAddCache
from xformer.ops.index_add import index_add as reference


@kernel(reference, "numpy")
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    """Sort the rows by id, and sum the rows of each id with `add.reduceat`."""
    ids = require_ids("index_add", "ids", private_copy(ids), x.shape[0], x)
    out = x.copy()
    add_rows(out, y, ids)
    return out, IndexAddCache(ids, x.shape)


def add_rows(out: Array, y: Array, ids: Array) -> None:
    """Compute out[ids[n]] += y[n] for every n, in place. The ids must be in range."""
    if ids.size:
        order = np.argsort(ids, kind="stable")
        unique_ids, start = np.unique(ids[order], return_index=True)
        out[unique_ids] += np.add.reduceat(y[order], start, axis=0)
