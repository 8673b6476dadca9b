"""`index_add` by JAX's indexed update."""

from __future__ import annotations

from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_ids
from xformer.ops.index_add import IndexAddCache
from xformer.ops.index_add import index_add as reference


@kernel(reference, "jax")
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    """Return x.at[ids].add(y). Rows of y with the same id are summed."""
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    return x.at[ids].add(y), IndexAddCache(ids, x.shape)
