"""`rms_norm`, and `rms_norm` of a sum x + r for `add_norm`. Each row is read once.

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
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import number, require_axis, require_gradient


def _refuses(x: Array, w: Array | None = None, *, offset: float = 0.0, **_: Any) -> str | None:
    return "an offset without w" if w is None and offset != 0 else None


@recorded(ops.rms_norm, _refuses)
def rms_norm(
    x: Array, w: Array | None = None, *, eps: float = 1e-5, offset: float = 0.0
) -> tuple[Array, NumbaRmsNormCache]:
    """y = x * rstd * (offset + w), rstd = 1 / sqrt(mean(x^2) + eps), over the last axis."""
    eps = number("rms_norm", "eps", eps, low=0)
    offset = number("rms_norm", "offset", offset)
    require_axis("rms_norm", x, -1)
    _, y, cache = normalise(x, None, w, eps, offset)
    return y, cache


def normalise(
    x: Array, r: Array | None, w: Array | None, eps: float, offset: float
) -> tuple[Array, Array, NumbaRmsNormCache]:
    """Return (s, y, cache): s = x + r, or x if r is None; y is the RMS norm of s.

    x, r, s, y: (..., D)   w: (D,) or None
    """
    has_w = w is not None
    x, r, w, _ = operands(x, r, w, None)
    numbers: Any = {"eps": eps, "offset": offset}
    if r is None:
        y, rstd = record(forward, "rms_norm", x, w, **numbers)
        return x, y, NumbaRmsNormCache(x, w, rstd, offset, has_w)
    y, rstd, s = record(add_forward, "add rms_norm", x, r, w, **numbers)
    return s, y, NumbaRmsNormCache(s, w, rstd, offset, has_w)


@short
class NumbaRmsNormCache(NamedTuple):
    """Saved by `rms_norm` for backward, which computes xhat = x * rstd again."""

    x: Array  # (..., D)
    w: Array  # (D,), ones if there is no gain
    rstd: Array  # (..., 1)
    offset: float
    has_w: bool

    def backward(self, dy: Array) -> tuple[Array, Array | None]:
        """dx = rstd * (dxhat - xhat * mean(dxhat * xhat)), dxhat = dy * (offset + w)."""
        return self.backward_with(dy, None)

    def backward_with(self, dy: Array, ds: Array | None) -> tuple[Array, Array | None]:
        """As `backward`, with ds (..., D) added to dx unless ds is None."""
        x, w, rstd, offset, has_w = self
        require_gradient("rms_norm", "dy", dy, x)
        program_of(x, w, dy, ds)  # Unrecorded if one is an array of NumPy
        has_ds, dy = ds is not None, in_order(dy, order_of(x, 1))
        numbers: Any = {"offset": offset, "has_ds": has_ds}
        ins = x, w, rstd, dy, ds if has_ds else dy
        dx, dws = record(backward, "rms_norm backward", *ins, **numbers)
        return dx, summed(dws) if has_w else None


@declared("y (N, D), rstd (N, 1) <- x (N, D), w (D)")
def forward(y: Any, rstd: Any, x: Any, w: Any, eps: float, offset: float) -> None:
    """Normalise rows."""
    rows_forward(x, _gain(w, offset), np.float32(eps), y, rstd)


@declared("y (N, D), rstd (N, 1), s (N, D) <- x (N, D), r (N, D), w (D)")
def add_forward(
    y: Any, rstd: Any, s: Any, x: Any, r: Any, w: Any, eps: float, offset: float
) -> None:
    """Compute s = x + r and normalise s."""
    gain = _gain(w, offset)
    for i in range(0, len(s), GROUP):
        at = slice(i, i + GROUP)
        add(x[at], r[at], s[at])
        rows_forward(s[at], gain, np.float32(eps), y[at], rstd[at])


@declared("dx (N, D), dws (P, D) <- x (N, D), w (D), rstd (N, 1), dy (N, D), ds (N, D)")
def backward(
    dx: Any, dws: Any, x: Any, w: Any, rstd: Any, dy: Any, ds: Any, offset: float, has_ds: int
) -> None:
    """Compute dx, and what the rows add to dw. has_ds: whether to add ds to dx."""
    gain, partial = _gain(w, offset), np.empty((1, w.size), np.float32)
    dws[:] = 0
    for i in range(0, len(dx), GROUP):
        at = slice(i, i + GROUP)
        rows_backward(x[at], gain, rstd[at], dy[at], dx[at], partial[0])
        add_to(dws, partial)
        if has_ds:
            add_to(dx[at], ds[at])


@rowwise
def _gain(w: Any, offset: float) -> Any:
    """Return offset + w as a new array (D,)."""
    gain = np.empty(w.size, np.float32)
    for j in range(w.size):
        gain[j] = w[j] + np.float32(offset)
    return gain


@rowwise
def rows_forward(x: Any, gain: Any, eps: Any, y: Any, rstd: Any) -> None:
    """Write y (n, D) and rstd (n, 1) of the rows x (n, D). gain: offset + w (D,)."""
    n, width = x.shape
    for i in range(n):
        total = np.float32(0)
        for j in range(width):
            total += x[i, j] * x[i, j]
        scale = np.float32(1) / math.sqrt(total / np.float32(width) + eps)
        rstd[i, 0] = scale
        for j in range(width):
            y[i, j] = x[i, j] * scale * gain[j]


@rowwise
def rows_backward(x: Any, gain: Any, rstd: Any, dy: Any, dx: Any, dw: Any) -> None:
    """Write dx (n, D) and the sum dw (D,) over the rows. x, dy: (n, D). gain: offset + w (D,)."""
    n, width = x.shape
    sums = np.zeros(width, x.dtype)
    dw[:] = 0
    for i in range(n):
        scale, mean = rstd[i, 0], np.float32(0)  # mean of dxhat * xhat
        for j in range(width):
            xhat = x[i, j] * scale
            mean += dy[i, j] * gain[j] * xhat
            sums[j] += dy[i, j] * xhat
        mean /= np.float32(width)
        for j in range(width):
            dx[i, j] = scale * (dy[i, j] * gain[j] - x[i, j] * scale * mean)
        if i % FEW == FEW - 1 or i == n - 1:  # a sum of partial sums is more exact
            dw += sums
            sums[:] = 0
