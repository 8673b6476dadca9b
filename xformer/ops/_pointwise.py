"""`clip` and `sign` that look at no value.

Those of array-api-compat set elements by a boolean index. On CuPy the host then waits for the
device, once for each bound, and no step with them can be captured in a CUDA graph.
"""

from __future__ import annotations

from array_api_compat import array_namespace

from xformer.typing import Array


def clip(x: Array, low: float, high: float) -> Array:
    """y = min(max(x, low), high), elementwise; NaN stays NaN.

    low, high: numbers of the kind of x: integers where x has integers.
    """
    xp = array_namespace(x)
    return xp.minimum(xp.maximum(x, low), high)


def sign(x: Array) -> Array:
    """y = 1 where x > 0, -1 where x < 0, 0 where x is 0 or -0, NaN where x is NaN."""
    xp = array_namespace(x)
    return xp.where(x > 0, 1.0, xp.where(x < 0, -1.0, xp.abs(x)))
