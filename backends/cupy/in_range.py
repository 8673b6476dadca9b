"""`in_range` for ids on the device, without a synchronization."""

from __future__ import annotations

from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import in_range as reference


@kernel(reference, "cupy")
def in_range(ids: Array, *, size: int, name: str = "ids") -> bool:
    """Return True without a check: the kernels return NaN for an id out of range."""
    return True
