"""`index_add` by `torch.index_add`."""

from __future__ import annotations

import torch

from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_ids
from xformer.ops.index_add import IndexAddCache
from xformer.ops.index_add import index_add as reference


@kernel(reference, "torch")
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    """Return x with y added at the rows ids. Rows of y with the same id are summed.

    On CUDA the order of the sums is not fixed.
    """
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    return torch.index_add(x, 0, ids, y), IndexAddCache(ids, x.shape)
