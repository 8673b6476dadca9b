"""`layer_norm` in blocks of rows: all operations on a block run while it is in a core's cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xformer.backends.numpy.rows import Sums, outer_factor, row_blocks, rows
from xformer.backends.numpy.threads import scratch
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import number, require_axis, require_gradient
from xformer.ops.layer_norm import layer_norm as reference

# |mean| / standard deviation. If it is larger, the rounding error of the mean matters, and the mean
# of the centred row is added to the mean.
FAR = 8.0


@kernel(reference, "numpy")
def layer_norm(
    x: Array, w: Array, b: Array | None = None, *, eps: float = 1e-5, eps_inside: bool = True
) -> tuple[Array, NumpyLayerNormCache]:
    """Centre the rows, compute the variance of the result, then apply rstd, w and b in place."""
    eps = number("layer_norm", "eps", eps, low=0)
    require_axis("layer_norm", x, -1)
    y, xs, width = np.empty(x.shape, x.dtype), rows(x), x.shape[-1]
    ys, gain = y.reshape(xs.shape), outer_factor(w)
    mean, rstd = np.empty(len(xs), x.dtype), np.zeros((len(xs), 2), x.dtype)

    def piece(start: int, stop: int) -> None:
        x, y, span = xs[start:stop], ys[start:stop], slice(start, stop)
        mean[span] = np.einsum("ij->i", x) / width
        np.subtract(x, mean[span, None], out=y)
        var = np.vecdot(y, y) / width
        if np.any(FAR * np.sqrt(var) < np.abs(mean[span])):
            mean[span] += np.einsum("ij->i", y) / width
            np.subtract(x, mean[span, None], out=y)
            var = np.vecdot(y, y) / width
        rstd[span, 0] = 1 / np.sqrt(var + eps) if eps_inside else 1 / (np.sqrt(var) + eps)
        y *= np.matmul(rstd[span], gain, out=scratch("gain", y.shape, y.dtype))
        if b is not None:
            y += b

    row_blocks(piece, *xs.shape)
    eps_outside = 0.0 if eps_inside else eps
    return y, NumpyLayerNormCache(x, w, mean, rstd, eps_outside, b is not None)


@short
class NumpyLayerNormCache(NamedTuple):
    """Saved by `layer_norm` for backward: xhat = (x - mean) * rstd is recomputed."""

    x: Array  # (..., D)
    w: Array  # (D,)
    mean: Array  # (N,)
    rstd: Array  # (N, 2), 1 / sqrt(var + eps) or 1 / (sqrt(var) + eps), and a column of zeros
    eps_outside: float  # eps if it is added outside the root, else 0
    has_b: bool

    def backward(self, dy: Array) -> tuple[Array, Array, Array | None]:
        """dx = rstd * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)), dxhat = dy * w."""
        require_gradient("layer_norm", "dy", dy, self.x)
        w, width = self.w, dy.shape[-1]
        dx, xs, dys = np.empty(dy.shape, dy.dtype), rows(self.x), rows(dy)
        dxs = dx.reshape(xs.shape)
        dw, db = (Sums(len(xs), width, dy.dtype) for _ in range(2))

        def piece(start: int, stop: int) -> None:
            span = slice(start, stop)
            dy, dx, rstd = dys[span], dxs[span], self.rstd[span, 0]
            centred = scratch("centred", dy.shape, dy.dtype)
            np.subtract(xs[span], self.mean[span, None], out=centred)
            np.multiply(dy, centred, out=dx)
            np.matmul(rstd, dx, out=dw.block_sum(start))
            mean = dx @ w * rstd / width  # mean(dxhat * xhat)
            if self.eps_outside:
                mean /= self._std_ratio(rstd)
            if self.has_b:
                np.matmul(np.ones_like(rstd), dy, out=db.block_sum(start))
            np.multiply(dy, w, out=dx)
            dx -= (dy @ w / width)[:, None]
            centred *= (mean * rstd)[:, None]
            dx -= centred
            dx *= rstd[:, None]

        row_blocks(piece, *xs.shape)
        return dx, dw.total(), db.total() if self.has_b else None

    def _std_ratio(self, rstd: Array) -> Array:
        """Return std / (std + eps) = 1 - eps * rstd; 1 for a constant row, whose xhat is 0."""
        ratio = 1 - self.eps_outside * rstd
        return np.where(ratio > 0, ratio, 1)
