"""`sum_to` of two-byte numbers over leading axes, summed in float32."""

from __future__ import annotations

import math

from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.module import contiguous
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.shapes import STORED
from xformer.ops.sum_to import sum_to as reference


def unsupported(x: Array, *, shape: tuple[int, ...]) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    if x.dtype.name not in STORED:
        return f"CuPy's own sums are right in {x.dtype.name}"
    if tuple(x.shape[x.ndim - len(shape) :]) != tuple(shape):
        return f"it sums leading axes only, not {tuple(x.shape)} to {tuple(shape)}"
    return None


@kernel(reference, "cupy", unsupported=unsupported, storage_dtypes=STORED)
def sum_to(x: Array, *, shape: tuple[int, ...]) -> Array:
    """Return x summed over its leading axes to `shape`, in a fixed order.

    The result is float32, like gradients of parameters.
    """
    xp = array_namespace(x)
    lead = math.prod(x.shape[: x.ndim - len(shape)])
    rows = contiguous(xp.reshape(x, (lead, math.prod(shape))))
    return xp.reshape(row_sums(rows), shape)
