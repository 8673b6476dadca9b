"""`layer_norm`, each row once through all of its formula."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.compiled import BLOCK, FEW, rowwise
from xformer.backends.numpy import layer_norm as numpys
from xformer.backends.numpy.rows import Sums, row_blocks, rows

from xformer.checks import number, require_axis, require_gradient
from xformer.typing import Array

FAR = np.float32(numpys.FAR**2)  # mean^2 over variance


def outside(
    x: Array, w: Array, b: Array | None = None, *, eps: float = 1e-5, eps_inside: bool = True
) -> str | None:
    """Why the kernel cannot run."""
    return None if eps_inside and x.dtype == np.float32 else "only float32 with eps inside"


def layer_norm(
    x: Array, w: Array, b: Array | None = None, *, eps: float = 1e-5, eps_inside: bool = True
) -> tuple[Array, LayerNormCache]:
    """Centred rows, their variance from these, then rstd, w and b."""
    eps = number("layer_norm", "eps", eps, low=0)
    require_axis("layer_norm", x, -1)
    y, xs = np.empty(x.shape, x.dtype), rows(x)
    ys, (mean, rstd) = y.reshape(xs.shape), np.empty((2, len(xs)), x.dtype)
    gain, offset = np.array(w), np.zeros_like(w) if b is None else np.array(b)

    def piece(start: int, stop: int) -> None:
        at = slice(start, stop)
        rows_forward(xs[at], gain, offset, np.float32(eps), ys[at], mean[at], rstd[at])

    row_blocks(piece, len(xs), xs.shape[1], BLOCK)
    return y, LayerNormCache(x, w, mean, rstd, b is not None)


class LayerNormCache(NamedTuple):
    """What `layer_norm` keeps for its backward."""

    x: Array  # (..., D)
    w: Array  # (D,)
    mean: Array  # (N,)
    rstd: Array  # (N,)
    has_b: bool

    def backward(self, dy: Array) -> tuple[Array, Array, Array | None]:
        """dx = rstd * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)), dxhat = dy * w."""
        require_gradient("layer_norm", "dy", dy, self.x)
        dx, xs, dys, w = np.empty(dy.shape, dy.dtype), rows(self.x), rows(dy), np.array(self.w)
        dxs = dx.reshape(xs.shape)
        dw, db = (Sums(len(xs), xs.shape[1], dy.dtype, BLOCK) for _ in range(2))

        def piece(start: int, stop: int) -> None:
            at, sums = slice(start, stop), (dw.of(start), db.of(start))
            rows_backward(xs[at], w, self.mean[at], self.rstd[at], dys[at], dxs[at], *sums)

        row_blocks(piece, len(xs), xs.shape[1], BLOCK)
        return dx, dw.total(), db.total() if self.has_b else None


@rowwise
def rows_forward(x: Any, w: Any, b: Any, eps: Any, y: Any, mean: Any, rstd: Any) -> None:
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
        mean[i], rstd[i] = centre, scale
        for j in range(width):
            y[i, j] = y[i, j] * scale * w[j] + b[j]


@rowwise
def _corrected(centre: Any, y: Any) -> Any:
    """The mean with what it has lost by rounding, of y = x - centre."""
    total = np.float32(0)
    for j in range(y.size):
        total += y[j]
    return centre + total / np.float32(y.size)


@rowwise
def _centred(x: Any, centre: Any, y: Any) -> Any:
    """y = x - centre; the sum of its squares."""
    total = np.float32(0)
    for j in range(y.size):
        y[j] = x[j] - centre
        total += y[j] * y[j]
    return total


@rowwise
def rows_backward(x: Any, w: Any, mean: Any, rstd: Any, dy: Any, dx: Any, dw: Any, db: Any) -> None:
    n, width = x.shape
    sums = np.zeros((2, width), x.dtype)
    dw[:] = 0
    db[:] = 0
    for i in range(n):
        centre, scale = mean[i], rstd[i]
        level = slope = np.float32(0)  # means of dxhat and of dxhat * xhat
        for j in range(width):
            xhat = (x[i, j] - centre) * scale
            dxhat = dy[i, j] * w[j]
            level += dxhat
            slope += dxhat * xhat
            sums[0, j] += dy[i, j] * xhat
            sums[1, j] += dy[i, j]
        level /= np.float32(width)
        slope /= np.float32(width)
        for j in range(width):
            xhat = (x[i, j] - centre) * scale
            dx[i, j] = scale * (dy[i, j] * w[j] - level - xhat * slope)
        if i % FEW == FEW - 1 or i == n - 1:
            dw += sums[0]
            db += sums[1]
            sums[:] = 0
