"""`index_add` by torch's own function."""

from __future__ import annotations

import torch

from xformer.checks import require_ids
from xformer.dispatch import kernel
from xformer.ops.index_add import IndexAddCache
from xformer.ops.index_add import index_add as reference
from xformer.typing import Array


@kernel(reference, "torch")
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    """torch.index_add, which sums repeated ids (on CUDA in no fixed order)."""
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    return torch.index_add(x, 0, ids, y), IndexAddCache(ids, x.shape)
