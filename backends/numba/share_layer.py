"""The loops of `share`: a layer, forward with what its backward needs, and that backward.

On one thread. x, y: (N, D), the N = B T tokens of a share. Only norms before the branches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba import layer_norm, rms_norm
from xformer.backends.numba.atomic import floats
from xformer.backends.numba.compiled import LOG2_E, rowwise
from xformer.backends.numba.flash import attend, attend_backward
from xformer.backends.numba.layer import (
    ACTIVATION,
    ATTN,
    DOWN,
    EPS,
    FFN,
    GAIN,
    GATE,
    GROUPS,
    HEADS,
    N_OUT,
    OFFSET,
    OUT,
    QUERY,
    RMS,
    SHIFT,
    UP,
    VALUE,
    VALUE_WIDTH,
    WIDTH,
    activate,
    slope,
    turn,
)
from xformer.backends.numba.maps import MORE, add, bias, multiply, multiply_backward
from xformer.backends.numba.tokens import COLUMNS, LEFT, RIGHT, ROWS

DGAIN, DSHIFT = range(2)  # of a norm's

attend_heads = rowwise(attend)
attend_heads_backward = rowwise(attend_backward)
layer_norm_rows, layer_norm_slopes = layer_norm.rows_forward, layer_norm.rows_backward
rms_norm_rows, rms_norm_slopes = rms_norm.rows_forward, rms_norm.rows_backward


@rowwise
def forward(by: Any, tables: Any, options: Any, x: Any, kept: Any, y: Any, h: Any) -> None:
    """y = middle + ffn(norm(middle)), middle = x + attn(norm(x)).

    tables: of the layer, as in `plan`. options: its `tiles` row, turns (2, all texts or 1, T, R/2),
    whether they are interleaved, pad (B, T) or (B, 0), and which text is the first. kept: mapped
    (N (H K + G K + G M)), queries, keys and values behind each other; ctx (N, H M), statistics
    (2, B, H, T), middle (N, D), ups (N, F), before the activation, opened, the same of a gate or
    (0, F), hidden (N, F). h: memory.
    """
    maps, norms, size, numbers, scale = tables
    tile, turns, interleaved, pad, first = options
    mapped, ctx, statistics, middle, ups, opened, hidden = kept
    norm(x, norms[ATTN], numbers[ATTN], h)
    start = 0
    for m in range(QUERY, VALUE + 1):
        out = mapped[start : start + len(x) * maps[m, N_OUT]].reshape(len(x), maps[m, N_OUT])
        multiply(by, h, maps[m], out)
        add(out, bias(maps[m]))
        start += out.size
    q, k, v = _heads(mapped, size, pad)
    _turn(q, first, turns, interleaved)
    _turn(k, first, turns, interleaved)
    out = ctx.reshape(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    window, sizes = (tile[LEFT], tile[RIGHT]), (tile[ROWS], tile[COLUMNS])
    given = q, k, v, pad, *window, scale * LOG2_E, sizes
    attend_heads(by, 0, k.shape[0] * k.shape[2], *given, out, statistics[0], statistics[1])
    multiply(by, ctx, maps[OUT], middle)
    _add_both(middle, bias(maps[OUT]), x)
    norm(middle, norms[FFN], numbers[FFN], h)
    multiply(by, h, maps[UP], ups)
    if len(opened):
        multiply(by, h, maps[GATE], opened)
    _open(size[ACTIVATION], bias(maps[UP]), bias(maps[GATE]), ups, opened, hidden)
    multiply(by, hidden, maps[DOWN], y)
    _add_both(y, bias(maps[DOWN]), middle)


@rowwise
def backward(
    by: Any,
    tables: Any,
    options: Any,
    x: Any,
    kept: Any,
    dy: Any,
    dmaps: Any,
    dnorms: Any,
    dx: Any,
    memory: Any,
) -> None:
    """dx of dy; dmaps (7, 4) and dnorms (4, 2) say where the parameters' gradients are to be.

    dx may be dy. The rest as in `forward`, but turns go back. memory: as large as dmiddle, h, dh,
    dhidden, dups, dopened, dctx and dmapped, of which dctx may be where dhidden is, and dmapped
    where dups is.
    """
    maps, norms, size, numbers, scale = tables
    tile, turns, interleaved, pad, first = options
    mapped, ctx, statistics, middle, ups, opened, hidden = kept
    dmiddle, h, dh, dhidden, dups, dopened, dctx, dmapped = memory
    more = dmaps[DOWN, MORE] != 0  # as of all others
    multiply_backward(by, hidden, maps[DOWN], dmaps[DOWN], dy, False, dhidden)
    _close(size[ACTIVATION], ups, opened, dhidden, dups, dopened)
    known = norm(middle, norms[FFN], numbers[FFN], h)
    multiply_backward(by, h, maps[UP], dmaps[UP], dups, False, dh)
    if len(opened):
        multiply_backward(by, h, maps[GATE], dmaps[GATE], dopened, True, dh)
    norm_backward(middle, norms[FFN], numbers[FFN], known, dnorms[FFN], more, dh, dmiddle)
    _add_all(dmiddle, dy)
    multiply_backward(by, ctx, maps[OUT], dmaps[OUT], dmiddle, False, dctx)
    q, k, v = _heads(mapped, size, pad)
    dq, dk, dv = _heads(dmapped, size, pad)
    out = ctx.reshape(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    window, sizes = (tile[LEFT], tile[RIGHT]), (tile[ROWS], tile[COLUMNS])
    given = q, k, v, pad, *window, scale, sizes, out, statistics[0], statistics[1]
    heads = 0, k.shape[0] * k.shape[2]
    attend_heads_backward(by, *heads, *given, dctx.reshape(out.shape), dq, dk, dv)
    _turn(dq, first, turns, interleaved)
    _turn(dk, first, turns, interleaved)
    known = norm(x, norms[ATTN], numbers[ATTN], h)
    start, keep = 0, False
    for m in range(QUERY, VALUE + 1):
        its = dmapped[start : start + len(x) * maps[m, N_OUT]].reshape(len(x), maps[m, N_OUT])
        multiply_backward(by, h, maps[m], dmaps[m], its, keep, dh)
        start, keep = start + its.size, True
    norm_backward(x, norms[ATTN], numbers[ATTN], known, dnorms[ATTN], more, dh, dx)
    _add_all(dx, dmiddle)


@rowwise
def _heads(mapped: Any, size: Any, pad: Any) -> Any:
    """Queries (B, T, H, K), keys (B, T, G, K) and values (B, T, G, M)."""
    n_heads, n_groups = size[HEADS], size[GROUPS]
    width, value_width, n_texts = size[WIDTH], size[VALUE_WIDTH], len(pad)
    n = mapped.size // (n_heads * width + n_groups * (width + value_width))
    k_at = n * n_heads * width
    v_at = k_at + n * n_groups * width
    q = mapped[:k_at].reshape(n_texts, n // n_texts, n_heads, width)
    k = mapped[k_at:v_at].reshape(n_texts, n // n_texts, n_groups, width)
    return q, k, mapped[v_at:].reshape(n_texts, n // n_texts, n_groups, value_width)


@rowwise
def _turn(x: Any, first: int, turns: Any, interleaved: bool) -> None:
    """`ops.rope` of (B, T, H, K), the texts from `first` on."""
    for b in range(x.shape[0] if turns.shape[3] else 0):
        its = (first + b) % turns.shape[1]
        for t in range(x.shape[1]):
            for h in range(x.shape[2]):
                turn(x[b, t, h], turns[0, its, t], turns[1, its, t], interleaved)


@rowwise
def _add_both(y: Any, b: Any, x: Any) -> None:
    for i in range(len(y)):
        for j in range(y.shape[1]):
            y[i, j] = x[i, j] + (y[i, j] + b[j])


@rowwise
def _add_all(y: Any, x: Any) -> None:
    for i in range(len(y)):
        for j in range(y.shape[1]):
            y[i, j] += x[i, j]


@rowwise
def _open(activation: int, b: Any, b_gate: Any, ups: Any, opened: Any, hidden: Any) -> None:
    """hidden = act(ups), or act(opened) ups; each with its bias, which stays in it."""
    for i in range(len(ups)):
        up, out = ups[i], hidden[i]
        for j in range(len(up)):
            up[j] += b[j]
        if len(opened):
            gate = opened[i]
            for j in range(len(up)):
                gate[j] += b_gate[j]
            activate(activation, gate, out)
            for j in range(len(up)):
                out[j] *= up[j]
        else:
            activate(activation, up, out)


@rowwise
def _close(activation: int, ups: Any, opened: Any, dhidden: Any, dups: Any, dopened: Any) -> None:
    """Gradients of ups, and of opened, by that of hidden, which is written over where gated."""
    for i in range(len(ups)):
        if len(opened):
            activate(activation, opened[i], dups[i])
            for j in range(ups.shape[1]):
                dups[i, j] *= dhidden[i, j]
                dhidden[i, j] *= ups[i, j]
            slope(activation, opened[i], dhidden[i], dopened[i])
        else:
            slope(activation, ups[i], dhidden[i], dups[i])


@rowwise
def norm(x: Any, own: Any, numbers: Any, y: Any) -> Any:
    """y = norm(x), or x where there is none. Returns means and 1 / deviations (2, N)."""
    d, eps, statistics = x.shape[1], numbers[EPS], np.empty((2, len(x)), np.float32)
    if own[GAIN] == 0:
        y[:] = x
    elif own[RMS]:
        rms_norm_rows(x, floats(own[GAIN], (d,)) + numbers[OFFSET], eps, y, statistics[1])
    else:
        shift = np.zeros(d, np.float32)
        if own[SHIFT]:
            shift[:] = floats(own[SHIFT], (d,))
        layer_norm_rows(x, floats(own[GAIN], (d,)), shift, eps, y, statistics[0], statistics[1])
    return statistics


@rowwise
def norm_backward(
    x: Any, own: Any, numbers: Any, statistics: Any, grads: Any, more: bool, dy: Any, dx: Any
) -> None:
    """statistics: what `norm` has returned."""
    d = x.shape[1]
    if own[GAIN] == 0:
        dx[:] = dy
        return
    gain, dgain, dshift = floats(own[GAIN], (d,)), np.empty(d, np.float32), np.empty(d, np.float32)
    if own[RMS]:
        rms_norm_slopes(x, gain + numbers[OFFSET], statistics[1], dy, dx, dgain)
    else:
        layer_norm_slopes(x, gain, statistics[0], statistics[1], dy, dx, dgain, dshift)
    _put(dgain, more, grads[DGAIN])
    if own[SHIFT]:
        _put(dshift, more, grads[DSHIFT])


@rowwise
def _put(x: Any, more: bool, place: int) -> None:
    out = floats(place, x.shape)
    if more:
        out += x
    else:
        out[:] = x
