"""What a piece of `tokens` computes: some rows of x, or all of them, and some columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.atomic import floats
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.flash_rows import ONE
from xformer.backends.numba.gemm import add_product
from xformer.backends.numba.layer import (
    ATTN_OUT,
    BIAS,
    BY_ROWS,
    DOWN,
    FFN_OUT,
    GAIN,
    GATE,
    N_IN,
    N_OUT,
    NORMS,
    OUT,
    QUERY,
    STEP,
    UP,
    VALUE,
    WEIGHT,
    activate,
    normalise,
)


@rowwise
def product(by: Any, x: Any, own: Any, start: int, stop: int, keep: bool, y: Any) -> None:
    """Columns of y = x w + b, or += that with keep, of contiguous rows."""
    n_in, step, width = own[N_IN], own[STEP], stop - start
    out = y[:, start:stop]
    if own[BY_ROWS]:
        w = floats(own[WEIGHT], (n_in, step))[:, start:stop]
        add_product(by, ONE, x, w, keep, out)
    else:
        w = floats(own[WEIGHT] + 4 * start * step, (width, step))[:, :n_in]
        add_product(by, ONE, x, w.T, keep, out)
    if own[BIAS]:
        b = floats(own[BIAS] + 4 * start, (width,))
        for i in range(len(y)):
            row = _part(y, i, start, stop)
            for j in range(width):
                row[j] += b[j]


@rowwise
def _part(y: Any, i: int, start: int, stop: int) -> Any:
    """Columns of row i: a slice of y would not be known to be contiguous, and not vectorised."""
    return floats(y.ctypes.data + 4 * (i * y.shape[1] + start), (stop - start,))


@rowwise
def open_columns(
    by: Any, x: Any, maps: Any, activation: int, start: int, stop: int, hidden: Any, ups: Any
) -> None:
    """Columns of hidden = act(up), or act(gate) up. ups: memory like hidden, of gated layers."""
    own, gate, width = maps[UP], maps[GATE], stop - start
    gated, row = gate[N_OUT] > 0, np.empty(width, np.float32)
    product(by, x, gate if gated else own, start, stop, False, hidden)
    if gated:
        product(by, x, own, start, stop, False, ups)
    for i in range(len(x)):
        out = _part(hidden, i, start, stop)
        for j in range(width):
            row[j] = out[j]
        activate(activation, row, out)
        if gated:
            up = _part(ups, i, start, stop)
            for j in range(width):
                out[j] *= up[j]


@rowwise
def add_rows(branch: Any, norms: Any, numbers: Any, own: int, x: Any, h: Any) -> None:
    """x += norm(branch), where there are rows of it, and h = norm'(x).

    own: which norm is the branch's, -1 before the first; that of the next branch follows.
    """
    for i in range(len(x)):
        if len(branch):
            normalise(branch[i], norms[own], numbers[own], branch[i])
            for j in range(x.shape[1]):
                x[i, j] += branch[i, j]
        normalise(x[i], norms[own + 1], numbers[own + 1], h[i])


@rowwise
def project(by: Any, h: Any, maps: Any, start: int, mapped: Any, n: int) -> None:
    """Queries, keys and values of the rows h of all n, which begin at `start`."""
    before = 0
    for m in range(QUERY, VALUE + 1):
        own = maps[m]
        y = mapped[before : before + n * own[N_OUT]].reshape(n, own[N_OUT])
        product(by, h, own, 0, own[N_OUT], False, y[start : start + len(h)])
        before += y.size


@rowwise
def behind_attention(
    by: Any,
    layer: int,
    maps: Any,
    norms: Any,
    activation: int,
    numbers: Any,
    seen: Any,
    x: Any,
    h: Any,
    inner: Any,
    ups: Any,
) -> None:
    """Rows of x through what follows a layer's attention, and h for the next one."""
    out, up = NORMS * layer + ATTN_OUT, maps[layer, UP]
    branch = _closed(by, seen, maps[layer, OUT], norms[out], x)
    add_rows(branch, norms, numbers, out, x, h)
    open_columns(by, h, maps[layer], activation, 0, up[N_OUT], inner, ups)
    out = NORMS * layer + FFN_OUT
    branch = _closed(by, inner, maps[layer, DOWN], norms[out], x)
    add_rows(branch, norms, numbers, out, x, h)


@rowwise
def _closed(by: Any, inner: Any, own: Any, norm: Any, x: Any) -> Any:
    """The branch, inner w + b, where a norm of it is to come; else it is added to x: no rows."""
    if norm[GAIN]:
        branch = np.empty(x.shape, np.float32)
        product(by, inner, own, 0, own[N_OUT], False, branch)
        return branch
    product(by, inner, own, 0, own[N_OUT], True, x)
    return np.empty((0, x.shape[1]), np.float32)
