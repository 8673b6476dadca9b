"""`rms_norm` in blocks of rows: all operations on a block run while it is in a core's cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numpy.rows import Sums, outer_factor, row_blocks, rows
from xformer.backends.numpy.threads import scratch
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import number, require_axis, require_gradient
from xformer.ops.rms_norm import rms_norm as reference


def unsupported(
    x: Array, w: Array | None = None, *, eps: float = 1e-5, offset: float = 0.0
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return "w is None" if w is None else None


@kernel(reference, "numpy", unsupported=unsupported)
def rms_norm(
    x: Array, w: Array | None = None, *, eps: float = 1e-5, offset: float = 0.0
) -> tuple[Array, NumpyRmsNormCache]:
    """y = gain * x / sqrt(mean(x^2) + eps), gain = w + offset."""
    eps = number("rms_norm", "eps", eps, low=0)
    offset = number("rms_norm", "offset", offset)
    require_axis("rms_norm", x, -1)
    gain: Any = w
    if offset:
        gain = gain + offset
    y, xs, width = np.empty(x.shape, x.dtype), rows(x), x.shape[-1]
    ys, gains, rstd = y.reshape(xs.shape), outer_factor(gain), np.zeros((len(xs), 2), x.dtype)

    def piece(start: int, stop: int) -> None:
        x, y, span = xs[start:stop], ys[start:stop], slice(start, stop)
        rstd[span, 0] = 1 / np.sqrt(np.vecdot(x, x) / width + eps)
        np.matmul(rstd[span], gains, out=y)
        y *= x

    row_blocks(piece, *xs.shape)
    return y, NumpyRmsNormCache(x, gain, rstd)


@short
class NumpyRmsNormCache(NamedTuple):
    """Saved by `rms_norm` for backward: xhat = x * rstd is recomputed."""

    x: Array  # (..., D)
    gain: Array  # (D,), w + offset
    rstd: Array  # (N, 2), 1 / sqrt(mean(x^2) + eps) of each row, and a column of zeros

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """dx = rstd * (dxhat - xhat * mean(dxhat * xhat)), dxhat = dy * gain."""
        require_gradient("rms_norm", "dy", dy, self.x)
        gain, width = self.gain, dy.shape[-1]
        dx, xs, dys = np.empty(dy.shape, dy.dtype), rows(self.x), rows(dy)
        dxs, dw = dx.reshape(xs.shape), Sums(len(xs), width, dy.dtype)

        def piece(start: int, stop: int) -> None:
            span = slice(start, stop)
            x, dy, dx, rstd = xs[span], dys[span], dxs[span], self.rstd[span, 0]
            np.multiply(dy, x, out=dx)
            np.matmul(rstd, dx, out=dw.block_sum(start))
            mean = dx @ gain * rstd**2 / width  # mean(dxhat * xhat) * rstd
            np.multiply(dy, gain, out=dx)
            dx -= np.multiply(x, mean[:, None], out=scratch("xhat", x.shape, x.dtype))
            dx *= rstd[:, None]

        row_blocks(piece, *xs.shape)
        return dx, dw.total()
