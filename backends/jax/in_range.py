"""`in_range` for ids on a device, and under tracing, where arrays have no values."""

from __future__ import annotations

import jax
import numpy as np

from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import in_range as reference


@kernel(reference, "jax")
def in_range(ids: Array, *, size: int, name: str = "ids") -> bool:
    """Return whether all ids are in [0, size); True if they are not on the host.

    JAX clamps ids out of range on a device.
    """
    if isinstance(ids, jax.core.Tracer) or any(d.platform != "cpu" for d in ids.devices()):
        return True
    host = np.asarray(ids)
    return bool(((host >= 0) & (host < size)).all())
