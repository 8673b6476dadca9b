"""`sum_to` of what is stored in two bytes, where whole leading axes are summed, in float32."""

from __future__ import annotations

import math

from array_api_compat import array_namespace

from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.module import contiguous
from xformer.dispatch import kernel
from xformer.ops.sum_to import sum_to as reference
from xformer.shapes import STORED
from xformer.typing import Array


def unsupported(x: Array, *, shape: tuple[int, ...]) -> str | None:
    """Why the kernel cannot run."""
    if x.dtype.name not in STORED:
        return f"CuPy's own sums are right in {x.dtype.name}"
    if tuple(x.shape[x.ndim - len(shape) :]) != tuple(shape):
        return f"it sums leading axes only, not {tuple(x.shape)} to {tuple(shape)}"
    return None


@kernel(reference, "cupy", unsupported=unsupported, storage_dtypes=STORED)
def sum_to(x: Array, *, shape: tuple[int, ...]) -> Array:
    """In a fixed order; float32, as gradients of parameters are."""
    xp = array_namespace(x)
    lead = math.prod(x.shape[: x.ndim - len(shape)])
    rows = contiguous(xp.reshape(x, (lead, math.prod(shape))))
    return xp.reshape(row_sums(rows), shape)
