"""`sdpa` with one query for each head, as in decoding.

This kernel serves calls with T = 1 and without softcap, dropout or bias. It reads each visible key
and value once, and no masked one. A backward reads the results of `sdpa_general` instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.flash_rows import LOWEST, ONE, ZERO, dot, highest, multiply, powers
from xformer.backends.numba.jit import LOG2_E, exp2, rowwise
from xformer.backends.numba.kernels.sdpa_operands import N_INS, read_call
from xformer.backends.numba.program.native import float32s, native, part, uint8s, words

ALL_VISIBLE = 0x0101010101010101  # eight bytes of a mask, all True


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute ctx of a piece of the B H heads.

    outputs: ctx (B, 1, H, M); inputs: `Operands`. integers: `Attention.numbers`.
    """
    a = words(args, 1 + N_INS)
    call = read_call(args + 8, args + 8 * (1 + N_INS), memory)
    (b, _, h), (s, groups, width), m = call.q.shape[:3], call.k.shape[1:], call.v.shape[3]
    q_strides, k_strides, v_strides = call.q.strides, call.k.strides, call.v.strides
    low = max(0, -call.left)  # the first key of the window
    start, stop = part(b * h, piece, pieces, 1)
    query, scores = np.empty(width, np.float32), np.empty(s, np.float32)
    ranges = np.empty((s // 2 + 1, 2), np.int64)
    n_ranges, last_mask = 1, 0
    ranges[0, 0], ranges[0, 1] = min(low, s), s
    for unit in range(start, stop):
        i, head = unit // h, unit % h
        group = head // (h // groups)
        if call.has_mask:
            mask = call.mask + i * call.mask_strides[0] + head * call.mask_strides[1]
            if mask != last_mask:
                n_ranges = _visible_ranges(mask, call.mask_strides[3], low, s, ranges)
                last_mask = mask
        q_at = a[1] + i * q_strides[0] + head * q_strides[2]
        multiply(float32s(q_at, (width,)), call.scale * LOG2_E, query)
        keys = a[2] + i * k_strides[0] + group * k_strides[2], k_strides[1]
        values = a[3] + i * v_strides[0] + group * v_strides[2], v_strides[1]
        sink = float32s(call.sinks + 4 * head, (1,))[0] * LOG2_E if call.has_sinks else LOWEST
        ctx = float32s(a[0] + 4 * unit * m, (m,))
        _attend(query, keys, values, sink, ranges[:n_ranges], scores, ctx)


@rowwise
def _attend(
    query: Any, keys: Any, values: Any, sink: Any, ranges: Any, scores: Any, ctx: Any
) -> None:
    """Write ctx (M,) of one head.

    query (K,): times scale * log2(e). sink: times log2(e), or -inf. keys, values: (address, stride
    between tokens in bytes). ranges (n, 2): first and end of each range of visible keys. scores
    (S,): scratch.
    """
    n, size = 0, (query.size,)
    for r in range(len(ranges)):
        for j in range(ranges[r, 0], ranges[r, 1]):
            scores[n] = dot(query, float32s(keys[0] + j * keys[1], size))
            n += 1
    shift = highest(scores[:n])
    shift = sink if sink > shift else shift
    shift = ZERO if shift == LOWEST else shift  # -inf - (-inf) would be NaN
    exp_sum = powers(scores[:n], shift)
    exp_sum += exp2(sink - shift) if sink != LOWEST else ZERO
    ctx[:], n = ZERO, 0
    for r in range(len(ranges)):
        first, end = ranges[r, 0], ranges[r, 1]
        _add(scores[n : n + end - first], values[0] + first * values[1], values[1], ctx)
        n += end - first
    multiply(ctx, ONE / (ONE if exp_sum == ZERO else exp_sum), ctx)


@rowwise
def _visible_ranges(mask: int, stride: int, low: int, high: int, ranges: Any) -> int:
    """Write the ranges of consecutive visible keys from low to high, and return their number.

    mask: address of the byte of key 0. stride: bytes to the next key. ranges (n, 2): first and end.
    """
    n, first = 0, _end_of_run(mask, stride, low, high, False)
    while first < high and n < len(ranges):  # n stays in bounds if the mask is changed meanwhile
        end = _end_of_run(mask, stride, first, high, True)
        ranges[n, 0], ranges[n, 1] = first, end
        first = _end_of_run(mask, stride, end, high, False)
        n += 1
    return n


@rowwise
def _end_of_run(mask: int, stride: int, first: int, high: int, visible: bool) -> int:
    """Return the first key from `first` on whose mask is not `visible`, or `high`."""
    eight, end = ALL_VISIBLE if visible else 0, first
    while end < high and (uint8s(mask + end * stride, 1)[0] != 0) == visible:
        aligned = stride == 1 and end + 8 <= high and (mask + end) % 8 == 0
        end += 8 if aligned and words(mask + end, 1)[0] == eight else 1
    return end


@rowwise
def _add(probs: Any, values: int, stride: int, ctx: Any) -> None:
    """Add sum of probs[j] * values[j] to ctx (M,), four rows at a time.

    values: address of the first row. stride: bytes to the next row.
    """
    size = (ctx.size,)
    multiple = probs.size // 4 * 4
    for j in range(0, multiple, 4):
        row = values + j * stride
        p0, p1, p2, p3 = probs[j], probs[j + 1], probs[j + 2], probs[j + 3]
        v0, v1 = float32s(row, size), float32s(row + stride, size)
        v2, v3 = float32s(row + 2 * stride, size), float32s(row + 3 * stride, size)
        for i in range(ctx.size):
            ctx[i] += p0 * v0[i] + p1 * v1[i] + p2 * v2[i] + p3 * v3[i]
    for j in range(multiple, probs.size):
        v = float32s(values + j * stride, size)
        for i in range(ctx.size):
            ctx[i] += probs[j] * v[i]
