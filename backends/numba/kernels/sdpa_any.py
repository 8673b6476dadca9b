"""`sdpa` with every option: softcap, bias, any mask, sinks and dropout, by whole rows of scores.

A tile of rows has all of its keys: top, total and the sum in the backward are exact, and what an
option does to a row is one loop in `sdpa_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import LOG2_E, exp2, rowwise
from xformer.backends.numba.flash_rows import LOWEST, ONE, ZERO, dot, multiply
from xformer.backends.numba.gemm import add_product
from xformer.backends.numba.kernels.sdpa_given import N_INS, read
from xformer.backends.numba.kernels.sdpa_rows import (
    drop,
    powers,
    probabilities,
    reach,
    score,
    slopes,
    top_of,
    words_of,
)
from xformer.backends.numba.program.native import float32s, native, part, words

N_SAVED = 4  # ctx, top, total, dctx: behind the operands of a backward


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute one piece of ctx, top and total.

    args: the outputs, then the operands (`read`). top: the largest score of a row. total: its sum
    of exponentials. The work is split into tiles of query rows, over all sequences and heads.
    """
    a = words(args, 3)
    g = read(args + 8 * 3, args + 8 * (3 + N_INS), memory)
    (b, t, h), s, m = g.q.shape[:3], g.k.shape[1], g.v.shape[3]
    ctx = float32s(a[0], (b, t, h, m))
    top, total = float32s(a[1], (b, h, t)), float32s(a[2], (b, h, t))
    scores, drawn = np.empty(g.rows * s, np.float32), words_of(s)
    tiles = (t + g.rows - 1) // g.rows
    start, stop = part(b * h * tiles, piece, pieces, 1)
    for unit in range(start, stop):
        text, head, first = unit // tiles // h, unit // tiles % h, unit % tiles * g.rows
        _attend(g, text, head, first, scores, drawn, ctx, top, total)


@rowwise
def _attend(
    g: Any, b: int, head: int, t: int, scores: Any, drawn: Any, ctx: Any, top: Any, total: Any
) -> None:
    """ctx, top and total of the rows from t on."""
    end, low, high = _bounds(g, t)
    e = scores[: (end - t) * (high - low)].reshape(end - t, high - low)
    sink = float32s(g.sinks + 4 * head, (1,))[0] if g.has_sinks else LOWEST
    if high == low:
        for i in range(t, end):
            ctx[b, i, head] = ZERO
            top[b, head, i] = top_of(e[i - t], sink)
            total[b, head, i] = ONE
        return
    group = head // (g.q.shape[2] // g.k.shape[2])
    add_product(g.by, g.scale, g.q[b, t:end, head], g.k[b, low:high, group].T, False, e)
    for i in range(t, end):
        row, (first, last) = e[i - t], reach(g, i, low, high)
        row[:first], row[last:] = ZERO, ZERO
        row = row[first:last]
        score(g, b, head, i, low + first, row, row, False)
        top[b, head, i] = top_of(row, sink)
        sums = powers(row, top[b, head, i])
        if g.has_sinks:
            sums += exp2((sink - top[b, head, i]) * LOG2_E)
        total[b, head, i] = ONE if sums == ZERO else sums
        if g.lowest:
            drop(g, b, head, i, low + first, drawn, row)
    add_product(g.by, ONE, e, g.v[b, low:high, group], False, ctx[b, t:end, head])
    for i in range(t, end):
        multiply(ctx[b, i, head], ONE / total[b, head, i], ctx[b, i, head])


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """dq, dk, dv; the operands, ctx, top, total, dctx. Pieces are heads of keys."""
    a = words(args, 3 + N_INS + N_SAVED)
    g = read(args + 8 * 3, args + 8 * (3 + N_INS + N_SAVED), memory)
    (b, t, h, width), (s, groups), m = g.q.shape, g.k.shape[1:3], g.v.shape[3]
    dq = float32s(a[0], (b, t, h, width))
    dk, dv = float32s(a[1], (b, s, groups, width)), float32s(a[2], (b, s, groups, m))
    top, total = float32s(a[11], (b, h, t)), float32s(a[12], (b, h, t))
    dctx = float32s(a[13], (b, t, h, m))
    buffers, shared = _buffers(g), h // groups
    dkeys, dvalues = np.empty((s, width), np.float32), np.empty((s, m), np.float32)
    start, stop = part(b * groups, piece, pieces, 1)
    for unit in range(start, stop):
        text, group = unit // groups, unit % groups
        dkeys[:], dvalues[:] = ZERO, ZERO
        for head in range(group * shared, (group + 1) * shared):
            for first in range(0, t, g.rows):
                _attend_backward(
                    g, text, head, first, buffers, top, total, dctx, dq, dkeys, dvalues
                )
        dk[text, :, group] = dkeys
        dv[text, :, group] = dvalues


@rowwise
def _buffers(g: Any) -> Any:
    """Memory of a tile's scores, their gradients, a row's slopes, and words."""
    s = g.k.shape[1]
    scores, dscores = np.empty(g.rows * s, np.float32), np.empty(g.rows * s, np.float32)
    return scores, dscores, np.empty(s, np.float32), words_of(s)


@rowwise
def _attend_backward(
    g: Any,
    b: int,
    head: int,
    t: int,
    buffers: Any,
    top: Any,
    total: Any,
    dctx: Any,
    dq: Any,
    dkeys: Any,
    dvalues: Any,
) -> None:
    """dq of the rows from t on, and what they add to dkeys and dvalues."""
    end, low, high = _bounds(g, t)
    if high == low:
        for i in range(t, end):
            dq[b, i, head] = ZERO
        return
    p, ds = _differentiate(g, b, head, t, end, low, high, buffers, top, total, dctx, True)
    group = head // (g.q.shape[2] // g.k.shape[2])
    queries, douts = g.q[b, t:end, head], dctx[b, t:end, head]
    add_product(g.by, ONE, p.T, douts, True, dvalues[low:high])
    add_product(g.by, ONE, ds.T, queries, True, dkeys[low:high])
    add_product(g.by, ONE, ds, g.k[b, low:high, group], False, dq[b, t:end, head])


@rowwise
def _differentiate(
    g: Any,
    b: int,
    head: int,
    t: int,
    end: int,
    low: int,
    high: int,
    buffers: Any,
    top: Any,
    total: Any,
    dctx: Any,
    through: bool,
) -> Any:
    """Probabilities after dropout (n, high - low), and gradients of scores.

    through: those of scale q k^T times scale, else those of what the softmax is taken of.
    """
    scores, dscores, slope, drawn = buffers
    shape = end - t, high - low
    p = scores[: shape[0] * shape[1]].reshape(shape)
    ds = dscores[: shape[0] * shape[1]].reshape(shape)
    group = head // (g.q.shape[2] // g.k.shape[2])
    add_product(g.by, g.scale, g.q[b, t:end, head], g.k[b, low:high, group].T, False, p)
    add_product(g.by, ONE, dctx[b, t:end, head], g.v[b, low:high, group].T, False, ds)
    for i in range(t, end):
        first, last = reach(g, i, low, high)
        p[i - t, :first], p[i - t, last:] = ZERO, ZERO
        ds[i - t, :first], ds[i - t, last:] = ZERO, ZERO
        probs, dprobs, own = p[i - t, first:last], ds[i - t, first:last], slope[: last - first]
        score(g, b, head, i, low + first, probs, own, through)
        if g.lowest:
            drop(g, b, head, i, low + first, drawn, dprobs)
        inner = probabilities(probs, dprobs, top[b, head, i], total[b, head, i])
        slopes(probs, dprobs, inner, g.scale if through else ONE)
        if through and g.cap:
            for j in range(own.size):
                dprobs[j] *= own[j]
        if g.lowest:
            drop(g, b, head, i, low + first, drawn, probs)
    return p, ds


@rowwise
def _bounds(g: Any, t: int) -> Any:
    """The end of the rows from t on, and from which to which key they see any."""
    s = g.k.shape[1]
    end = min(t + g.rows, g.q.shape[1])
    low = min(s, max(0, t - g.left))
    return end, low, max(low, min(s, end + g.right))


def bias_units(shape: tuple[int, ...], rows: int) -> int:
    """How many parts of a bias have sums of their own: heads, and tiles of rows."""
    b, h, t, _ = shape
    return b * h * (-(-t // rows) if t > 1 else 1)


@native
def bias_gradient(args: int, piece: int, pieces: int, memory: int) -> None:
    """dbias, C-contiguous; the operands, ctx, top, total, dctx. Pieces are `bias_units`.

    Each sums over the batch, heads, rows and keys that share it, in this order, in float64.
    """
    a = words(args, 1 + N_INS + N_SAVED)
    g = read(args + 8, args + 8 * (1 + N_INS + N_SAVED), memory)
    (b, t, h), m = g.q.shape[:3], g.v.shape[3]
    top, total = float32s(a[9], (b, h, t)), float32s(a[10], (b, h, t))
    dctx, shape = float32s(a[11], (b, t, h, m)), g.bias_shape
    tiles = (shape[2] + g.rows - 1) // g.rows
    start, stop = part(shape[0] * shape[1] * tiles, piece, pieces, 1)
    buffers = _buffers(g)
    for unit in range(start, stop):
        text, head, t_first = unit // tiles // shape[1], unit // tiles % shape[1], unit % tiles
        t_first *= g.rows
        t_last = t if shape[2] == 1 else min(t, t_first + g.rows)
        sums = np.zeros((min(shape[2] - t_first, g.rows), shape[3]), np.float64)
        for i in range(text, b if shape[0] == 1 else text + 1):
            for j in range(head, h if shape[1] == 1 else head + 1):
                for first in range(t_first, t_last, g.rows):
                    _add_dscores(g, i, j, first, buffers, top, total, dctx, sums)
        n = sums.size
        at = ((text * shape[1] + head) * shape[2] + t_first) * shape[3]
        out, flat = float32s(a[0] + 4 * at, (n,)), sums.reshape(n)
        for i in range(n):
            out[i] = flat[i]


@rowwise
def _add_dscores(
    g: Any, b: int, head: int, t: int, buffers: Any, top: Any, total: Any, dctx: Any, sums: Any
) -> None:
    """sums += gradients of the scores of the rows from t on."""
    end, low, high = _bounds(g, t)
    if high == low:
        return
    ds = _differentiate(g, b, head, t, end, low, high, buffers, top, total, dctx, False)[1]
    for i in range(end - t):
        out, row = sums[min(i, len(sums) - 1)], ds[i]
        if out.size == 1:
            for j in range(row.size):
                out[0] += row[j]
        else:
            for j in range(row.size):
                out[low + j] += row[j]


@native
def sink_gradient(args: int, piece: int, pieces: int, memory: int) -> None:
    """dsinks (H,); the operands, ctx, top, total, dctx. Pieces are heads."""
    a = words(args, 1 + N_INS + N_SAVED)
    g = read(args + 8, args + 8 * (1 + N_INS + N_SAVED), memory)
    (b, t, h), m = g.q.shape[:3], g.v.shape[3]
    ctx, dctx = float32s(a[8], (b, t, h, m)), float32s(a[11], (b, t, h, m))
    top, total = float32s(a[9], (b, h, t)), float32s(a[10], (b, h, t))
    dsinks, sinks = float32s(a[0], (h,)), float32s(a[5], (h,))
    start, stop = part(h, piece, pieces, 1)
    for head in range(start, stop):
        dsink = 0.0
        for i in range(b):
            for j in range(t):
                share = exp2((sinks[head] - top[i, head, j]) * LOG2_E) / total[i, head, j]
                dsink -= share * dot(dctx[i, j, head], ctx[i, j, head])
        dsinks[head] = dsink
