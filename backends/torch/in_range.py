"""`in_range` for tensors whose values are on a device, or, on torch's meta device, nowhere."""

from __future__ import annotations

from xformer.checks import in_range as reference
from xformer.dispatch import kernel
from xformer.typing import Array


def unsupported(ids: Array, *, size: int) -> str | None:
    """Why this kernel, which looks at nothing, must not answer for these ids."""
    return "the ids have values to look at" if ids.device.type == "cpu" else None


@kernel(reference, "torch", unsupported=unsupported)
def in_range(ids: Array, *, size: int) -> bool:
    """Nothing is known to be out of range; on CUDA torch itself reports an id that is, later."""
    return True
