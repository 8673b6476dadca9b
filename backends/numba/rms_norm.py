"""`rms_norm`, each row once through all of its formula."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.compiled import BLOCK, FEW, rowwise
from xformer.backends.numpy.rows import Sums, row_blocks, rows

from xformer.checks import number, require_axis, require_gradient
from xformer.typing import Array


def no_gain(
    x: Array, w: Array | None = None, *, eps: float = 1e-5, offset: float = 0.0
) -> str | None:
    """Why the kernel cannot run."""
    return None if w is not None and x.dtype == np.float32 else "only float32 with w"


def rms_norm(
    x: Array, w: Array | None = None, *, eps: float = 1e-5, offset: float = 0.0
) -> tuple[Array, RmsNormCache]:
    """The mean square of a row, then rstd and the gain."""
    eps = number("rms_norm", "eps", eps, low=0)
    gain = np.array(w) + np.float32(number("rms_norm", "offset", offset))
    require_axis("rms_norm", x, -1)
    y, xs = np.empty(x.shape, x.dtype), rows(x)
    ys, rstd = y.reshape(xs.shape), np.empty(len(xs), x.dtype)

    def piece(start: int, stop: int) -> None:
        at = slice(start, stop)
        rows_forward(xs[at], gain, np.float32(eps), ys[at], rstd[at])

    row_blocks(piece, len(xs), xs.shape[1], BLOCK)
    return y, RmsNormCache(x, gain, rstd)


class RmsNormCache(NamedTuple):
    """What `rms_norm` keeps for its backward."""

    x: Array  # (..., D)
    gain: Array  # (D,)
    rstd: Array  # (N,)

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """dx = rstd * (dxhat - xhat * mean(dxhat * xhat)), dxhat = dy * gain."""
        require_gradient("rms_norm", "dy", dy, self.x)
        dx, xs, dys = np.empty(dy.shape, dy.dtype), rows(self.x), rows(dy)
        dxs, dw = dx.reshape(xs.shape), Sums(len(xs), xs.shape[1], dy.dtype, BLOCK)

        def piece(start: int, stop: int) -> None:
            at = slice(start, stop)
            rows_backward(xs[at], self.gain, self.rstd[at], dys[at], dxs[at], dw.of(start))

        row_blocks(piece, len(xs), xs.shape[1], BLOCK)
        return dx, dw.total()


@rowwise
def rows_forward(x: Any, gain: Any, eps: Any, y: Any, rstd: Any) -> None:
    n, width = x.shape
    for i in range(n):
        total = np.float32(0)
        for j in range(width):
            total += x[i, j] * x[i, j]
        scale = np.float32(1) / math.sqrt(total / np.float32(width) + eps)
        rstd[i] = scale
        for j in range(width):
            y[i, j] = x[i, j] * scale * gain[j]


@rowwise
def rows_backward(x: Any, gain: Any, rstd: Any, dy: Any, dx: Any, dw: Any) -> None:
    n, width = x.shape
    sums = np.zeros(width, x.dtype)
    dw[:] = 0
    for i in range(n):
        scale, slope = rstd[i], np.float32(0)  # mean of dxhat * xhat
        for j in range(width):
            xhat = x[i, j] * scale
            slope += dy[i, j] * gain[j] * xhat
            sums[j] += dy[i, j] * xhat
        slope /= np.float32(width)
        for j in range(width):
            dx[i, j] = scale * (dy[i, j] * gain[j] - x[i, j] * scale * slope)
        if i % FEW == FEW - 1 or i == n - 1:
            dw += sums
            sums[:] = 0
