"""`in_range` by the minimum and the maximum, without three arrays of the size of the ids."""

from __future__ import annotations

from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import in_range as reference


@kernel(reference, "numpy")
def in_range(ids: Array, *, size: int, name: str = "ids") -> bool:
    """Return whether all ids are in [0, size)."""
    return ids.size == 0 or bool(ids.min() >= 0 and ids.max() < size)
