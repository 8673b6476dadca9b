"""`layer_norm`, and `layer_norm` of a sum x + r for `add_norm`. Each row is read once.

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
from xformer.backends.numpy import layer_norm as numpys
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import number, require_axis, require_gradient
from xformer.ops.layer_norm import LayerNormCache as ReferenceCache

FAR = np.float32(numpys.FAR**2)  # mean^2 / variance from which the mean is corrected


def unsupported(
    x: Array, w: Array, b: Array | None = None, *, eps: float = 1e-5, eps_inside: bool = True
) -> str | None:
    """Return why the numba kernel of `layer_norm` cannot run, or None if it can.

    It needs float32 arrays, not all constants of the program, and eps inside the root.
    """
    return unrecordable(x, w, b) if eps_inside else "eps is outside the root"


@kernel(ops.layer_norm, "numba.kernels", unsupported=unsupported)
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
    program, has_b = program_of(x, r, w, b), b is not None
    x, r, w, b = operands(x, r, w, b)
    order = order_of(x, 1)
    y = fresh_in(program, order, x.shape, x.dtype)
    mean, rstd = (fresh_in(program, order, (*x.shape[:-1], 1), x.dtype) for _ in range(2))

    def run(y: Any, mean: Any, rstd: Any, x: Any, w: Any, b: Any) -> None:
        y[...], cache = ops.layer_norm.reference(x, w, b, eps=eps)
        mean[...], rstd[...] = cache.mean, cache.rstd

    def run_sum(y: Any, mean: Any, rstd: Any, s: Any, x: Any, r: Any, w: Any, b: Any) -> None:
        run(y, mean, rstd, np.add(x, r, out=s), w, b)

    numbers, pieces = (x.size // x.shape[-1], x.shape[-1], bits(eps)), pieces_of(program, x)
    if r is None:
        compiled = Native(forward, numbers, pieces)
        program.emit("layer_norm", run, [y, mean, rstd], [x, w, b], compiled)
        return x, y, NumbaLayerNormCache(x, w, mean, rstd, has_b)
    s, compiled = fresh_in(program, order, x.shape, x.dtype), Native(add_forward, numbers, pieces)
    program.emit("add layer_norm", run_sum, [y, mean, rstd, s], [x, r, w, b], compiled)
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
        program, order = program_of(x, w, dy, ds), order_of(x, 1)
        dx, pieces = fresh_in(program, order, x.shape, x.dtype), pieces_of(program, x)
        # dw and db are sums over pieces.
        dws, dbs = (program.fresh((pieces, x.shape[-1]), x.dtype) for _ in range(2))
        dy = in_order(dy, order)
        has_ds = ds is not None
        ds = dy if ds is None else in_order(ds, order)

        def run(dx: Any, dws: Any, dbs: Any, *ins: Any) -> None:
            x, w, mean, rstd, dy, ds = ins
            dx_norm, dw, db = ReferenceCache(x, w, mean, rstd, 0.0, True).backward(dy)
            dx[...] = dx_norm + ds if has_ds else dx_norm
            for parts, sums in ((dws, dw), (dbs, db)):
                parts[0], parts[1:] = sums, 0

        compiled = Native(backward, (x.size // x.shape[-1], x.shape[-1], has_ds), pieces)
        ins = [x, w, mean, rstd, dy, ds]
        program.emit("layer_norm backward", run, [dx, dws, dbs], ins, compiled)
        return dx, summed(dws), summed(dbs) if has_b else None


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Normalise a piece of the rows.

    outputs: y (N, D), mean (N,), rstd (N,); inputs: x (N, D), w (D,), b (D,). integers: N, D, bits
    of eps.
    """
    a = words(args, 9)
    start, stop = part(a[6], piece, pieces, 1)
    _normalise(a[0], a[1], a[2], a[3], a[4], a[5], start, stop, a[7], real(a[8]))


@native
def add_forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute s = x + r and normalise s, for a piece of the rows.

    outputs: y (N, D), mean (N,), rstd (N,), s (N, D); inputs: x, r (N, D), w (D,), b (D,).
    integers: N, D, bits of eps.
    """
    a = words(args, 11)
    start, stop = part(a[8], piece, pieces, 1)
    for first in range(start, stop, GROUP):
        end = min(first + GROUP, stop)
        add(
            block(a[4], first, end, a[9]),
            block(a[5], first, end, a[9]),
            block(a[3], first, end, a[9]),
        )
        _normalise(a[0], a[1], a[2], a[3], a[6], a[7], first, end, a[9], real(a[10]))


@rowwise
def _normalise(
    y: int,
    mean: int,
    rstd: int,
    x: int,
    w: int,
    b: int,
    first: int,
    end: int,
    width: int,
    eps: float,
) -> None:
    """Normalise the rows `first` to `end`. y to b: addresses. width: D."""
    rows_forward(
        block(x, first, end, width),
        float32s(w, (width,)),
        float32s(b, (width,)),
        np.float32(eps),
        block(y, first, end, width),
        float32s(mean + 4 * first, (end - first,)),
        float32s(rstd + 4 * first, (end - first,)),
    )


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute dx of a piece of the rows, and what these rows add to dw and db.

    outputs: dx (N, D), dws and dbs (pieces, D); inputs: x (N, D), w (D,), mean and rstd (N,),
    dy, ds (N, D). integers: N, D, whether to add ds to dx (1) or to ignore ds (0).
    """
    a = words(args, 12)
    start, stop = part(a[9], piece, pieces, 1)
    dw, db = (block(a[1], piece, piece + 1, a[10]), block(a[2], piece, piece + 1, a[10]))
    partial = np.empty((2, a[10]), np.float32)
    dw[:] = 0
    db[:] = 0
    for first in range(start, stop, GROUP):
        end = min(first + GROUP, stop)
        dx = block(a[0], first, end, a[10])
        rows_backward(
            block(a[3], first, end, a[10]),
            float32s(a[4], (a[10],)),
            float32s(a[5] + 4 * first, (end - first,)),
            float32s(a[6] + 4 * first, (end - first,)),
            block(a[7], first, end, a[10]),
            dx,
            partial[0],
            partial[1],
        )
        add_to(dw, partial[:1])
        add_to(db, partial[1:])
        if a[11]:
            add_to(dx, block(a[8], first, end, a[10]))


@rowwise
def rows_forward(x: Any, w: Any, b: Any, eps: Any, y: Any, mean: Any, rstd: Any) -> None:
    """Write y (n, D), mean and rstd (n,) of the rows x (n, D). w, b: (D,).

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
        mean[i], rstd[i] = centre, scale
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
    """Write dx (n, D) and the sums dw, db (D,) over the rows. x, dy: (n, D). mean, rstd: (n,)."""
    n, width = x.shape
    sums = np.zeros((2, width), x.dtype)
    dw[:] = 0
    db[:] = 0
    for i in range(n):
        centre, scale = mean[i], rstd[i]
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
