"""`index_add` by CuPy's atomic additions."""

from __future__ import annotations

import cupyx

from xformer.checks import require_ids
from xformer.dispatch import kernel
from xformer.ops.index_add import IndexAddCache
from xformer.ops.index_add import index_add as reference
from xformer.typing import Array


@kernel(reference, "cupy")
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    """cupyx.scatter_add, which sums repeated ids in no fixed order."""
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    out = x.copy()
    cupyx.scatter_add(out, ids, y)
    return out, IndexAddCache(ids, x.shape)
