"""`sdpa` with every option: softcap, bias, any mask, sinks and dropout.

These kernels serve calls that `sdpa_flash` does not: those with a softcap, bias, sinks, dropout or
a mask of single scores, and those with few queries. A tile is some queries of one head with the
scores of all their keys, so that no softmax is rescaled; `sdpa_row_loops` applies the options.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.flash_rows import LOWEST, ONE, ZERO, copy, dot, multiply
from xformer.backends.numba.jit import LOG2_E, exp2, rowwise
from xformer.backends.numba.kernels.sdpa_operands import N_INS, read_call
from xformer.backends.numba.kernels.sdpa_row_loops import (
    apply_options,
    dropout,
    dropout_scratch,
    reach,
    row_shift,
    to_dscores,
    to_exponentials,
    to_probs,
)
from xformer.backends.numba.matmul import add_product
from xformer.backends.numba.program.native import float32s, native, part, words

N_SAVED = 4  # ctx, shift, exp_sum, dctx: inputs of a backward after its `Operands`


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute ctx of a piece of the tiles, and what their backward reads.

    outputs: ctx (B, T, H, M), shift and exp_sum (B, H, T); inputs: `Operands`. integers:
    `Attention.numbers`. shift: the largest score of a row. exp_sum: its sum of exponentials.
    """
    a = words(args, 3)
    call = read_call(args + 8 * 3, args + 8 * (3 + N_INS), memory)
    (b, t, h), s, m = call.q.shape[:3], call.k.shape[1], call.v.shape[3]
    ctx = float32s(a[0], (b, t, h, m))
    shift, exp_sum = float32s(a[1], (b, h, t)), float32s(a[2], (b, h, t))
    scores, scratch = np.empty(call.tile_rows * s, np.float32), dropout_scratch(s)
    tiles = (t + call.tile_rows - 1) // call.tile_rows
    start, stop = part(b * h * tiles, piece, pieces, 1)
    for unit in range(start, stop):
        sequence, head, first = unit // tiles // h, unit // tiles % h, unit % tiles * call.tile_rows
        _attend_tile(call, sequence, head, first, scores, scratch, ctx, shift, exp_sum)


@rowwise
def _attend_tile(
    call: Any,
    b: int,
    head: int,
    t: int,
    scores: Any,
    scratch: Any,
    ctx: Any,
    shift: Any,
    exp_sum: Any,
) -> None:
    """Write ctx, shift and exp_sum of one tile: sequence b, `head`, queries from t on.

    scores: memory of a tile's scores. scratch: from `dropout_scratch`.
    """
    end, low, high = _bounds(call, t)
    tile = scores[: (end - t) * (high - low)].reshape(end - t, high - low)
    sink = float32s(call.sinks + 4 * head, (1,))[0] if call.has_sinks else LOWEST
    if high == low:
        for i in range(t, end):
            ctx[b, i, head] = ZERO
            shift[b, head, i] = row_shift(tile[i - t], sink)
            exp_sum[b, head, i] = ONE
        return
    group = head // (call.q.shape[2] // call.k.shape[2])
    queries, keys = call.q[b, t:end, head], call.k[b, low:high, group]
    add_product(call.thread, call.scale, queries, keys.T, False, tile)
    for i in range(t, end):
        row, (first, last) = tile[i - t], reach(call, i, low, high)
        row[:first], row[last:] = ZERO, ZERO
        row = row[first:last]
        apply_options(call, b, head, i, low + first, row, row, False)
        shift[b, head, i] = row_shift(row, sink)
        sums = to_exponentials(row, shift[b, head, i])
        if call.has_sinks:
            sums += exp2((sink - shift[b, head, i]) * LOG2_E)
        exp_sum[b, head, i] = ONE if sums == ZERO else sums
        if call.lowest_kept:
            dropout(call, b, head, i, low + first, scratch, row)
    add_product(call.thread, ONE, tile, call.v[b, low:high, group], False, ctx[b, t:end, head])
    for i in range(t, end):
        multiply(ctx[b, i, head], ONE / exp_sum[b, head, i], ctx[b, i, head])


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute dq, dk and dv of a piece of the B G heads of keys.

    outputs: dq (B, T, H, K), dk (B, S, G, K), dv (B, S, G, M); inputs: `Operands`, ctx
    (B, T, H, M), shift and exp_sum (B, H, T), dctx (B, T, H, M). integers: `Attention.numbers`.
    """
    a = words(args, 3 + N_INS + N_SAVED)
    call = read_call(args + 8 * 3, args + 8 * (3 + N_INS + N_SAVED), memory)
    (b, t, h, width), (s, groups), m = call.q.shape, call.k.shape[1:3], call.v.shape[3]
    dq = float32s(a[0], (b, t, h, width))
    dk, dv = float32s(a[1], (b, s, groups, width)), float32s(a[2], (b, s, groups, m))
    shift, exp_sum = float32s(a[11], (b, h, t)), float32s(a[12], (b, h, t))
    dctx = float32s(a[13], (b, t, h, m))
    buffers, shared = _buffers(call), h // groups
    dkeys, dvalues = np.empty((s, width), np.float32), np.empty((s, m), np.float32)
    start, stop = part(b * groups, piece, pieces, 1)
    for unit in range(start, stop):
        sequence, group = unit // groups, unit % groups
        dkeys[:], dvalues[:] = ZERO, ZERO
        for head in range(group * shared, (group + 1) * shared):
            for first in range(0, t, call.tile_rows):
                _differentiate_tile(
                    call, sequence, head, first, buffers, shift, exp_sum, dctx, dq, dkeys, dvalues
                )
        for j in range(s):
            copy(dkeys[j], dk[sequence, j, group])
            copy(dvalues[j], dv[sequence, j, group])


@rowwise
def _buffers(call: Any) -> Any:
    """Return memory of a tile's scores, its dscores, a row of derivatives, and of `dropout`."""
    s = call.k.shape[1]
    size = call.tile_rows * s
    scores, dscores = np.empty(size, np.float32), np.empty(size, np.float32)
    return scores, dscores, np.empty(s, np.float32), dropout_scratch(s)


@rowwise
def _differentiate_tile(
    call: Any,
    b: int,
    head: int,
    t: int,
    buffers: Any,
    shift: Any,
    exp_sum: Any,
    dctx: Any,
    dq: Any,
    dkeys: Any,
    dvalues: Any,
) -> None:
    """Write dq of one tile (sequence b, `head`, queries from t on); add to dkeys and dvalues.

    buffers: from `_buffers`. dkeys (S, K), dvalues (S, M): sums over the queries of a head of keys.
    """
    end, low, high = _bounds(call, t)
    if high == low:
        for i in range(t, end):
            dq[b, i, head] = ZERO
        return
    p, ds = _probs_and_dscores(
        call, b, head, t, end, low, high, buffers, shift, exp_sum, dctx, True
    )
    group = head // (call.q.shape[2] // call.k.shape[2])
    queries, douts = call.q[b, t:end, head], dctx[b, t:end, head]
    add_product(call.thread, ONE, p.T, douts, True, dvalues[low:high])
    add_product(call.thread, ONE, ds.T, queries, True, dkeys[low:high])
    add_product(call.thread, ONE, ds, call.k[b, low:high, group], False, dq[b, t:end, head])


@rowwise
def _probs_and_dscores(
    call: Any,
    b: int,
    head: int,
    t: int,
    end: int,
    low: int,
    high: int,
    buffers: Any,
    shift: Any,
    exp_sum: Any,
    dctx: Any,
    of_product: bool,
) -> Any:
    """Return (probs after dropout, dscores) of queries t to end and keys low to high.

    of_product: whether dscores are the gradients of q k^T; else those of the softmax's argument,
    after softcap and bias. buffers: from `_buffers`, which the results are views of.
    """
    scores, dscores, derivatives, scratch = buffers
    shape = end - t, high - low
    p = scores[: shape[0] * shape[1]].reshape(shape)
    ds = dscores[: shape[0] * shape[1]].reshape(shape)
    group = head // (call.q.shape[2] // call.k.shape[2])
    queries, keys = call.q[b, t:end, head], call.k[b, low:high, group]
    add_product(call.thread, call.scale, queries, keys.T, False, p)
    add_product(call.thread, ONE, dctx[b, t:end, head], call.v[b, low:high, group].T, False, ds)
    for i in range(t, end):
        first, last = reach(call, i, low, high)
        p[i - t, :first], p[i - t, last:] = ZERO, ZERO
        ds[i - t, :first], ds[i - t, last:] = ZERO, ZERO
        probs, dprobs = p[i - t, first:last], ds[i - t, first:last]
        derivative = derivatives[: last - first]
        apply_options(call, b, head, i, low + first, probs, derivative, of_product)
        if call.lowest_kept:
            dropout(call, b, head, i, low + first, scratch, dprobs)
        inner = to_probs(probs, dprobs, shift[b, head, i], exp_sum[b, head, i])
        to_dscores(probs, dprobs, inner, call.scale if of_product else ONE)
        if of_product and call.cap:
            for j in range(derivative.size):
                dprobs[j] *= derivative[j]
        if call.lowest_kept:
            dropout(call, b, head, i, low + first, scratch, probs)
    return p, ds


@rowwise
def _bounds(call: Any, t: int) -> Any:
    """Return (end, low, high): the tile from query t on ends at `end`; its keys are low to high."""
    s = call.k.shape[1]
    end = min(t + call.tile_rows, call.q.shape[1])
    low = min(s, max(0, t - call.left))
    return end, low, max(low, min(s, end + call.right))


def bias_units(shape: tuple[int, ...], rows: int) -> int:
    """Return how many units dbias is computed in: its heads times its tiles of rows."""
    b, h, t, _ = shape
    return b * h * (-(-t // rows) if t > 1 else 1)


@native
def bias_gradient(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute dbias of a piece of the `bias_units`.

    outputs: dbias, of the shape of bias; inputs: as of `backward`. integers: `Attention.numbers`.
    An axis along which bias is broadcast is summed over, in float64: first sequences, then heads,
    queries and keys.
    """
    a = words(args, 1 + N_INS + N_SAVED)
    call = read_call(args + 8, args + 8 * (1 + N_INS + N_SAVED), memory)
    (b, t, h), m = call.q.shape[:3], call.v.shape[3]
    shift, exp_sum = float32s(a[9], (b, h, t)), float32s(a[10], (b, h, t))
    dctx, shape = float32s(a[11], (b, t, h, m)), call.bias_shape
    tiles = (shape[2] + call.tile_rows - 1) // call.tile_rows
    start, stop = part(shape[0] * shape[1] * tiles, piece, pieces, 1)
    buffers = _buffers(call)
    for unit in range(start, stop):
        sequence, head, t_first = unit // tiles // shape[1], unit // tiles % shape[1], unit % tiles
        t_first *= call.tile_rows
        t_last = t if shape[2] == 1 else min(t, t_first + call.tile_rows)
        sums = np.zeros((min(shape[2] - t_first, call.tile_rows), shape[3]), np.float64)
        for i in range(sequence, b if shape[0] == 1 else sequence + 1):
            for j in range(head, h if shape[1] == 1 else head + 1):
                for first in range(t_first, t_last, call.tile_rows):
                    _add_dscores(call, i, j, first, buffers, shift, exp_sum, dctx, sums)
        n = sums.size
        at = ((sequence * shape[1] + head) * shape[2] + t_first) * shape[3]
        out, flat = float32s(a[0] + 4 * at, (n,)), sums.reshape(n)
        for i in range(n):
            out[i] = flat[i]


@rowwise
def _add_dscores(
    call: Any,
    b: int,
    head: int,
    t: int,
    buffers: Any,
    shift: Any,
    exp_sum: Any,
    dctx: Any,
    sums: Any,
) -> None:
    """Add dscores of one tile (sequence b, `head`, queries from t on) to sums.

    sums (rows of a bias or 1, S or 1): the part of dbias that the tile adds to, in float64.
    """
    end, low, high = _bounds(call, t)
    if high == low:
        return
    _, ds = _probs_and_dscores(
        call, b, head, t, end, low, high, buffers, shift, exp_sum, dctx, False
    )
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
    """Compute dsinks of a piece of the heads.

    outputs: dsinks (H,); inputs: as of `backward`. integers: `Attention.numbers`.
    """
    a = words(args, 1 + N_INS + N_SAVED)
    call = read_call(args + 8, args + 8 * (1 + N_INS + N_SAVED), memory)
    (b, t, h), m = call.q.shape[:3], call.v.shape[3]
    ctx, dctx = float32s(a[8], (b, t, h, m)), float32s(a[11], (b, t, h, m))
    shift, exp_sum = float32s(a[9], (b, h, t)), float32s(a[10], (b, h, t))
    dsinks, sinks = float32s(a[0], (h,)), float32s(a[5], (h,))
    start, stop = part(h, piece, pieces, 1)
    for head in range(start, stop):
        dsink = 0.0
        for i in range(b):
            for j in range(t):
                prob = exp2((sinks[head] - shift[i, head, j]) * LOG2_E) / exp_sum[i, head, j]
                dsink -= prob * dot(dctx[i, j, head], ctx[i, j, head])
        dsinks[head] = dsink
