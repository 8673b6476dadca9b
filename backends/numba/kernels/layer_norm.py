"""`layer_norm`, and `layer_norm` of a sum x + r for `add_norm`. Each row is read once.

The arithmetic is in `rows_forward` and `rows_backward`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.jit import FEW, rowwise
from xformer.backends.numba.kernels.layout import in_order, order_of, record, recorded
from xformer.backends.numba.kernels.norms import GROUP, add, add_to, operands, summed
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.program import program_of
from xformer.backends.numpy import layer_norm as numpys
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import number, require_axis, require_gradient

FAR = np.float32(numpys.FAR**2)  # mean^2 / variance from which the mean is corrected


def _refuses(*arrays: Array, eps_inside: bool = True, **_: Any) -> str | None:
    return None if eps_inside else "eps is outside the root"


@recorded(ops.layer_norm, _refuses)
def layer_norm(
    x: Array, w: Array, b: Array | None = None, *, eps: float = 1e-5, eps_inside: bool = True
) -> tuple[Array, NumbaLayerNormCache]:
    """y = (x - mean) * rstd * w + b over the last axis.

    The variance is computed from centred rows: rstd = 1 / sqrt(mean((x - mean)^2) + eps).
    """
    eps = number("layer_norm", "eps", eps, low=0)
    require_axis("layer_norm", x, -1)
    _, y, cache = normalise(x, None, w, b, eps)
    return y, cache


def normalise(
    x: Array, r: Array | None, w: Array, b: Array | None, eps: float
) -> tuple[Array, Array, NumbaLayerNormCache]:
    """Return (s, y, cache): s = x + r, or x if r is None; y is the layer norm of s.

    x, r, s, y: (..., D)   w, b: (D,); b may be None
    """
    has_b = b is not None
    x, r, w, b = operands(x, r, w, b)
    if r is None:
        y, mean, rstd = record(forward, "layer_norm", x, w, b, eps=eps)
        return x, y, NumbaLayerNormCache(x, w, mean, rstd, has_b)
    y, mean, rstd, s = record(add_forward, "add layer_norm", x, r, w, b, eps=eps)
    return s, y, NumbaLayerNormCache(s, w, mean, rstd, has_b)


@short
class NumbaLayerNormCache(NamedTuple):
    """Saved by `layer_norm` for backward, which computes xhat = (x - mean) * rstd again."""

    x: Array  # (..., D)
    w: Array  # (D,)
    mean: Array  # (..., 1)
    rstd: Array  # (..., 1)
    has_b: bool

    def backward(self, dy: Array) -> tuple[Array, Array, Array | None]:
        """dx = rstd * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)), dxhat = dy * w."""
        return self.backward_with(dy, None)

    def backward_with(self, dy: Array, ds: Array | None) -> tuple[Array, Array, Array | None]:
        """As `backward`, with ds (..., D) added to dx unless ds is None."""
        x, w, mean, rstd, has_b = self
        require_gradient("layer_norm", "dy", dy, x)
        program_of(x, w, dy, ds)  # Unrecorded if one is an array of NumPy
        has_ds, dy = ds is not None, in_order(dy, order_of(x, 1))
        ins = x, w, mean, rstd, dy, ds if has_ds else dy
        dx, dws, dbs = record(backward, "layer_norm backward", *ins, has_ds=has_ds)
        return dx, summed(dws), summed(dbs) if has_b else None


@declared("y (N, D), mean (N, 1), rstd (N, 1) <- x (N, D), w (D), b (D)")
def forward(y: Any, mean: Any, rstd: Any, x: Any, w: Any, b: Any, eps: float) -> None:
    """Normalise rows."""
    rows_forward(x, w, b, np.float32(eps), y, mean, rstd)


@declared("y (N, D), mean (N, 1), rstd (N, 1), s (N, D) <- x (N, D), r (N, D), w (D), b (D)")
def add_forward(
    y: Any, mean: Any, rstd: Any, s: Any, x: Any, r: Any, w: Any, b: Any, eps: float
) -> None:
    """Compute s = x + r and normalise s."""
    for i in range(0, len(s), GROUP):
        at = slice(i, i + GROUP)
        add(x[at], r[at], s[at])
        rows_forward(s[at], w, b, np.float32(eps), y[at], mean[at], rstd[at])


@declared(
    "dx (N, D), dws (P, D), dbs (P, D) "
    "<- x (N, D), w (D), mean (N, 1), rstd (N, 1), dy (N, D), ds (N, D)"
)
def backward(
    dx: Any,
    dws: Any,
    dbs: Any,
    x: Any,
    w: Any,
    mean: Any,
    rstd: Any,
    dy: Any,
    ds: Any,
    has_ds: int,
) -> None:
    """Compute dx, and what the rows add to dw and db. has_ds: whether to add ds to dx."""
    partial = np.empty((2, w.size), np.float32)
    dws[:], dbs[:] = 0, 0
    for i in range(0, len(dx), GROUP):
        at = slice(i, i + GROUP)
        rows_backward(x[at], w, mean[at], rstd[at], dy[at], dx[at], partial[0], partial[1])
        add_to(dws, partial[:1])
        add_to(dbs, partial[1:])
        if has_ds:
            add_to(dx[at], ds[at])


@rowwise
def rows_forward(x: Any, w: Any, b: Any, eps: Any, y: Any, mean: Any, rstd: Any) -> None:
    """Write y (n, D), mean and rstd (n, 1) of the rows x (n, D). w, b: (D,).

    If |mean| is much larger than the standard deviation, the rounding error of the mean is
    corrected first.
    """
    n, width = x.shape
    for i in range(n):
        total = np.float32(0)
        for j in range(width):
            total += x[i, j]
        centre = total / np.float32(width)
        total = np.float32(0)
        for j in range(width):
            y[i, j] = x[i, j] - centre
            total += y[i, j] * y[i, j]
        if FAR * total < np.float32(width) * centre * centre:
            centre = _corrected(centre, y[i])
            total = _centred(x[i], centre, y[i])
        scale = np.float32(1) / math.sqrt(total / np.float32(width) + eps)
        mean[i, 0], rstd[i, 0] = centre, scale
        for j in range(width):
            y[i, j] = y[i, j] * scale * w[j] + b[j]


@rowwise
def _corrected(centre: Any, y: Any) -> Any:
    """Return centre + mean(y), y = x - centre: the mean of x without its rounding error."""
    total = np.float32(0)
    for j in range(y.size):
        total += y[j]
    return centre + total / np.float32(y.size)


@rowwise
def _centred(x: Any, centre: Any, y: Any) -> Any:
    """Write y = x - centre, and return the sum of y^2."""
    total = np.float32(0)
    for j in range(y.size):
        y[j] = x[j] - centre
        total += y[j] * y[j]
    return total


@rowwise
def rows_backward(x: Any, w: Any, mean: Any, rstd: Any, dy: Any, dx: Any, dw: Any, db: Any) -> None:
    """Write dx (n, D) and the sums dw, db (D,) over the rows. x, dy: (n, D). mean, rstd: (n, 1)."""
    n, width = x.shape
    sums = np.zeros((2, width), x.dtype)
    dw[:] = 0
    db[:] = 0
    for i in range(n):
        centre, scale = mean[i, 0], rstd[i, 0]
        mean1 = mean2 = np.float32(0)  # means of dxhat and of dxhat * xhat
        for j in range(width):
            xhat = (x[i, j] - centre) * scale
            dxhat = dy[i, j] * w[j]
            mean1 += dxhat
            mean2 += dxhat * xhat
            sums[0, j] += dy[i, j] * xhat
            sums[1, j] += dy[i, j]
        mean1 /= np.float32(width)
        mean2 /= np.float32(width)
        for j in range(width):
            xhat = (x[i, j] - centre) * scale
            dx[i, j] = scale * (dy[i, j] * w[j] - mean1 - xhat * mean2)
        if i % FEW == FEW - 1 or i == n - 1:  # a sum of partial sums is more exact
            dw += sums[0]
            db += sums[1]
            sums[:] = 0
