"""`in_range` for ids on the device, which are not waited for."""

from __future__ import annotations

from xformer.checks import in_range as reference
from xformer.dispatch import kernel
from xformer.typing import Array


@kernel(reference, "cupy")
def in_range(ids: Array, *, size: int) -> bool:
    """Nothing is known to be out of range: the kernels give NaN for an id that is."""
    return True
