"""`rms_norm`, and `rms_norm` of a sum x + r for `add_norm`. Each row is read once.

The arithmetic is in `rows_forward` and `rows_backward`. The other functions check arguments, record
instructions and divide the rows among pieces.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.compiled import FEW, rowwise
from xformer.backends.numba.kernels.layout import (
    fresh_in,
    in_order,
    order_of,
    program_of,
    unrecordable,
)
from xformer.backends.numba.kernels.norms import (
    GROUP,
    add,
    add_to,
    block,
    operands,
    pieces_of,
    summed,
)
from xformer.backends.numba.program.native import Native, bits, float32s, native, part, real, words
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import number, require_axis, require_gradient
from xformer.ops.rms_norm import RmsNormCache as ReferenceCache


def unsupported(
    x: Array, w: Array | None = None, *, eps: float = 1e-5, offset: float = 0.0
) -> str | None:
    """Return why the numba kernel of `rms_norm` cannot run, or None if it can.

    It needs float32 arrays, not all constants of the program, and offset 0 if w is None.
    """
    return "an offset without w" if w is None and offset != 0 else unrecordable(x, w)


@kernel(ops.rms_norm, "numba.kernels", unsupported=unsupported)
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
    program, has_w = program_of(x, r, w), w is not None
    x, r, w, _ = operands(x, r, w, None)
    order = order_of(x, 1)
    y = fresh_in(program, order, x.shape, x.dtype)
    rstd = fresh_in(program, order, (*x.shape[:-1], 1), x.dtype)

    def run(y: Any, rstd: Any, x: Any, w: Any) -> None:
        y[...], cache = ops.rms_norm.reference(x, w, eps=eps, offset=offset)
        rstd[...] = cache.rstd

    def run_sum(y: Any, rstd: Any, s: Any, x: Any, r: Any, w: Any) -> None:
        run(y, rstd, np.add(x, r, out=s), w)

    numbers = x.size // x.shape[-1], x.shape[-1], bits(eps), bits(offset)
    pieces = pieces_of(program, x)
    if r is None:
        program.emit("rms_norm", run, [y, rstd], [x, w], Native(forward, numbers, pieces))
        return x, y, NumbaRmsNormCache(x, w, rstd, offset, has_w)
    s, compiled = fresh_in(program, order, x.shape, x.dtype), Native(add_forward, numbers, pieces)
    program.emit("add rms_norm", run_sum, [y, rstd, s], [x, r, w], compiled)
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
        program, order = program_of(x, w, dy, ds), order_of(x, 1)
        dx, pieces = fresh_in(program, order, x.shape, x.dtype), pieces_of(program, x)
        dws = program.fresh((pieces, x.shape[-1]), x.dtype)  # dw is the sum over pieces
        dy, has_ds = in_order(dy, order), ds is not None
        ds = dy if ds is None else in_order(ds, order)

        def run(dx: Any, dws: Any, x: Any, w: Any, rstd: Any, dy: Any, ds: Any) -> None:
            dx_norm, dw = ReferenceCache(x, w, rstd, offset).backward(dy)
            dx[...] = dx_norm + ds if has_ds else dx_norm
            dws[0], dws[1:] = dw, 0

        numbers = x.size // x.shape[-1], x.shape[-1], bits(offset), has_ds
        compiled = Native(backward, numbers, pieces)
        program.emit("rms_norm backward", run, [dx, dws], [x, w, rstd, dy, ds], compiled)
        return dx, summed(dws) if has_w else None


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Normalise a piece of the rows.

    outputs: y (N, D), rstd (N,); inputs: x (N, D), w (D,). integers: N, D, bits of eps and offset.
    """
    a = words(args, 8)
    start, stop = part(a[4], piece, pieces, 1)
    gain = _gain(a[3], a[5], real(a[7]))
    _normalise(a[0], a[1], a[2], gain, start, stop, real(a[6]))


@native
def add_forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute s = x + r and normalise s, for a piece of the rows.

    outputs: y (N, D), rstd (N,), s (N, D); inputs: x, r (N, D), w (D,). integers: N, D, bits of eps
    and offset.
    """
    a = words(args, 10)
    start, stop = part(a[6], piece, pieces, 1)
    gain = _gain(a[5], a[7], real(a[9]))
    for first in range(start, stop, GROUP):
        end = min(first + GROUP, stop)
        add(
            block(a[3], first, end, a[7]),
            block(a[4], first, end, a[7]),
            block(a[2], first, end, a[7]),
        )
        _normalise(a[0], a[1], a[2], gain, first, end, real(a[8]))


@rowwise
def _gain(w: int, width: int, offset: float) -> Any:
    """Return offset + w as a new array (width,). w: its address."""
    gain = np.empty(width, np.float32)
    weights = float32s(w, (width,))
    for j in range(width):
        gain[j] = weights[j] + np.float32(offset)
    return gain


@rowwise
def _normalise(y: int, rstd: int, x: int, gain: Any, first: int, end: int, eps: float) -> None:
    """Normalise the rows `first` to `end`. y, rstd, x: addresses. gain: (D,)."""
    rows_forward(
        block(x, first, end, gain.size),
        gain,
        np.float32(eps),
        block(y, first, end, gain.size),
        float32s(rstd + 4 * first, (end - first,)),
    )


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute dx of a piece of the rows, and what these rows add to dw.

    outputs: dx (N, D), dws (pieces, D); inputs: x (N, D), w (D,), rstd (N,), dy, ds (N, D).
    integers: N, D, bits of offset, whether to add ds to dx (1) or to ignore ds (0).
    """
    a = words(args, 11)
    start, stop = part(a[7], piece, pieces, 1)
    gain, partial = _gain(a[3], a[8], real(a[9])), np.empty((1, a[8]), np.float32)
    sums = block(a[1], piece, piece + 1, a[8])
    sums[:] = 0
    for first in range(start, stop, GROUP):
        end = min(first + GROUP, stop)
        dx = block(a[0], first, end, a[8])
        rows_backward(
            block(a[2], first, end, a[8]),
            gain,
            float32s(a[4] + 4 * first, (end - first,)),
            block(a[5], first, end, a[8]),
            dx,
            partial[0],
        )
        add_to(sums, partial)
        if a[10]:
            add_to(dx, block(a[6], first, end, a[8]))


@rowwise
def rows_forward(x: Any, gain: Any, eps: Any, y: Any, rstd: Any) -> None:
    """Write y (n, D) and rstd (n,) of the rows x (n, D). gain: offset + w (D,)."""
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
    """Write dx (n, D) and the sum dw (D,) over the rows. x, dy: (n, D). gain: offset + w (D,)."""
    n, width = x.shape
    sums = np.zeros(width, x.dtype)
    dw[:] = 0
    for i in range(n):
        scale, mean = rstd[i], np.float32(0)  # mean of dxhat * xhat
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
