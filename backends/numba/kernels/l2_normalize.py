"""`l2_normalize`: rows divided by their norms. Each row is read once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.kernels.layout import record, recorded
from xformer.backends.numba.program.declared import declared
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import number, require_axis, require_gradient


@recorded(ops.l2_normalize)
def l2_normalize(x: Array, *, eps: float = 1e-12) -> tuple[Array, NumbaL2NormalizeCache]:
    """y = x / max(|x|, eps), |x| the Euclidean norm over the last axis."""
    eps = number("l2_normalize", "eps", eps, low=0)
    require_axis("l2_normalize", x, -1)
    y, norm = record(forward, "l2_normalize", x, eps=eps)
    return y, NumbaL2NormalizeCache(y, norm, eps)


@short
class NumbaL2NormalizeCache(NamedTuple):
    """Saved by `l2_normalize` for backward; x is not needed."""

    y: Array  # (..., D)
    norm: Array  # (..., 1), of x
    eps: float

    def backward(self, dy: Array) -> Array:
        """dx = (dy - y * sum(dy * y)) / |x|, or dy / eps if |x| < eps."""
        y, norm, eps = self
        require_gradient("l2_normalize", "dy", dy, y)
        return record(backward, "l2_normalize backward", y, norm, dy, eps=eps)[0]


@declared("y (N, D), norm (N, 1) <- x (N, D)")
def forward(y: Any, norm: Any, x: Any, eps: float) -> None:
    """Normalise rows."""
    n, width = x.shape
    for i in range(n):
        total = np.float32(0)
        for j in range(width):
            total += x[i, j] * x[i, j]
        norm[i, 0] = math.sqrt(total)
        length = max(norm[i, 0], np.float32(eps))
        for j in range(width):
            y[i, j] = x[i, j] / length


@declared("dx (N, D) <- y (N, D), norm (N, 1), dy (N, D)")
def backward(dx: Any, y: Any, norm: Any, dy: Any, eps: float) -> None:
    """Compute dx of rows."""
    n, width = y.shape
    for i in range(n):
        projection, length = np.float32(0), max(norm[i, 0], np.float32(eps))
        for j in range(width):
            projection += dy[i, j] * y[i, j]  # sum(dy * y)
        if norm[i, 0] < np.float32(eps):
            projection = np.float32(0)
        for j in range(width):
            dx[i, j] = (dy[i, j] - y[i, j] * projection) / length
