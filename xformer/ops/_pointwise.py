"""`clip` and `sign` that do not wait for a device.

`clip` and `sign` of array-api-compat assign by a boolean index. On CuPy the host then waits for the
device, once for each bound, and a step that calls them cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array


def clip(x: Array, low: float, high: float) -> Array:
    """y = min(max(x, low), high), elementwise; NaN stays NaN.

    low, high: numbers, integers if x has integers.
    """
    xp = array_namespace(x)
    return xp.minimum(xp.maximum(x, low), high)


def sign(x: Array) -> Array:
    """y = 1 if x > 0, -1 if x < 0, 0 if x is 0 or -0, NaN if x is NaN, elementwise."""
    xp = array_namespace(x)
    return xp.where(x > 0, 1.0, xp.where(x < 0, -1.0, xp.abs(x)))
