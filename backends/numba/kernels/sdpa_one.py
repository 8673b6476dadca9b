"""`sdpa` of one query, as in decoding: each key that it sees is read once, and no other."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import LOG2_E, exp2, rowwise
from xformer.backends.numba.flash_rows import LOWEST, ONE, ZERO, dot, highest, multiply, powers
from xformer.backends.numba.kernels.sdpa_given import N_INS, read
from xformer.backends.numba.program.native import float32s, native, part, uint8s, words

ALL_SEEN = 0x0101010101010101  # eight columns of a mask


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """ctx; the operands. Pieces are heads of queries."""
    a = words(args, 1 + N_INS)
    g = read(args + 8, args + 8 * (1 + N_INS), memory)
    (b, _, h), (s, groups, width), m = g.q.shape[:3], g.k.shape[1:], g.v.shape[3]
    q_steps, k_steps, v_steps, low = g.q.strides, g.k.strides, g.v.strides, max(0, -g.left)
    start, stop = part(b * h, piece, pieces, 1)
    query, scores = np.empty(width, np.float32), np.empty(s, np.float32)
    runs = np.empty((s // 2 + 1, 2), np.int64)
    n_runs, last = 1, 0
    runs[0, 0], runs[0, 1] = min(low, s), s
    for unit in range(start, stop):
        text, head = unit // h, unit % h
        group = head // (h // groups)
        if g.has_mask:
            seen = g.mask + text * g.mask_steps[0] + head * g.mask_steps[1]
            if seen != last:
                n_runs, last = _find_runs(seen, g.mask_steps[3], low, s, runs), seen
        own = a[1] + text * q_steps[0] + head * q_steps[2]
        multiply(float32s(own, (width,)), g.scale * LOG2_E, query)
        keys = a[2] + text * k_steps[0] + group * k_steps[2], k_steps[1]
        values = a[3] + text * v_steps[0] + group * v_steps[2], v_steps[1]
        sink = float32s(g.sinks + 4 * head, (1,))[0] * LOG2_E if g.has_sinks else LOWEST
        ctx = float32s(a[0] + 4 * unit * m, (m,))
        _attend(query, keys, values, sink, runs[:n_runs], scores, ctx)


@rowwise
def _attend(
    query: Any, keys: Any, values: Any, sink: Any, runs: Any, scores: Any, ctx: Any
) -> None:
    """ctx (M,) of a head. query: times scale and log2 e, as sink. keys, values: (address, step)."""
    n, size = 0, (query.size,)
    for r in range(len(runs)):
        for j in range(runs[r, 0], runs[r, 1]):
            scores[n] = dot(query, float32s(keys[0] + j * keys[1], size))
            n += 1
    top = highest(scores[:n])
    top = sink if sink > top else top
    top = ZERO if top == LOWEST else top  # -inf taken off itself would be no number
    total = powers(scores[:n], top)
    total += exp2(sink - top) if sink != LOWEST else ZERO
    ctx[:], n = ZERO, 0
    for r in range(len(runs)):
        first, end = runs[r, 0], runs[r, 1]
        _add(scores[n : n + end - first], values[0] + first * values[1], values[1], ctx)
        n += end - first
    multiply(ctx, ONE / (ONE if total == ZERO else total), ctx)


@rowwise
def _find_runs(seen: int, step: int, low: int, high: int, runs: Any) -> int:
    """Columns side by side that are seen, from and to, from `low` on; how many such runs.

    seen: where the first column's byte is, and `step` to the next one.
    """
    n, first = 0, _end_of(seen, step, low, high, False)
    while first < high and n < len(runs):  # another thread may write to the mask meanwhile
        end = _end_of(seen, step, first, high, True)
        runs[n, 0], runs[n, 1] = first, end
        first = _end_of(seen, step, end, high, False)
        n += 1
    return n


@rowwise
def _end_of(seen: int, step: int, first: int, high: int, value: bool) -> int:
    """The first column from `first` on that is seen where `value` is not, or the reverse."""
    eight, end = ALL_SEEN if value else 0, first
    while end < high and (uint8s(seen + end * step, 1)[0] != 0) == value:
        aligned = step == 1 and end + 8 <= high and (seen + end) % 8 == 0
        end += 8 if aligned and words(seen + end, 1)[0] == eight else 1
    return end


@rowwise
def _add(e: Any, values: int, step: int, ctx: Any) -> None:
    """ctx += e values, four rows at once: ctx is read and written once for them."""
    size = (ctx.size,)
    even = e.size // 4 * 4
    for j in range(0, even, 4):
        at, e0, e1, e2, e3 = values + j * step, e[j], e[j + 1], e[j + 2], e[j + 3]
        v0, v1 = float32s(at, size), float32s(at + step, size)
        v2, v3 = float32s(at + 2 * step, size), float32s(at + 3 * step, size)
        for i in range(ctx.size):
            ctx[i] += e0 * v0[i] + e1 * v1[i] + e2 * v2[i] + e3 * v3[i]
    for j in range(even, e.size):
        row = float32s(values + j * step, size)
        for i in range(ctx.size):
            ctx[i] += e[j] * row[i]
