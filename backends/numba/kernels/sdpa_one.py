"""`sdpa` of one query, as in decoding: each key that it sees is read once, and no other."""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.compiled import LOG2_E, exp2, rowwise
from xformer.backends.numba.flash_rows import LOWEST, ONE, ZERO, dot
from xformer.backends.numba.kernels.sdpa_given import N_INS, read
from xformer.backends.numba.kernels.sdpa_rows import powers, top_of
from xformer.backends.numba.program.native import float32s, native, part, uint8s, words

ALL_SEEN = 0x0101010101010101  # eight columns of a mask


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """ctx; the operands. Pieces are heads of queries."""
    a = words(args, 1 + N_INS)
    g = read(args + 8, args + 8 * (1 + N_INS), memory)
    (b, _, h), m = g.q.shape[:3], g.v.shape[3]
    start, stop = part(b * h, piece, pieces, 1)
    scores = np.empty(g.k.shape[1], np.float32)
    for unit in range(start, stop):
        ctx = float32s(a[0] + 4 * unit * m, (m,))
        _attend(g, a[1], a[2], a[3], unit // h, unit % h, scores, ctx)


@rowwise
def _attend(g: Any, q: int, k: int, v: int, b: int, head: int, scores: Any, ctx: Any) -> None:
    """ctx (M,) of a head. q, k, v: addresses, so that rows have a known stride."""
    (s, groups, width), steps = g.k.shape[1:], g.k.strides
    group, query = head // (g.q.shape[2] // groups), q + b * g.q.strides[0] + head * g.q.strides[2]
    keys, values = k + b * steps[0] + group * steps[2], v + b * g.v.strides[0]
    values += group * g.v.strides[2]
    seen, step = g.mask + b * g.mask_steps[0] + head * g.mask_steps[1], g.mask_steps[3]
    seen = seen if g.has_mask else 0
    low, own, n = max(0, -g.left), float32s(query, (width,)), 0
    first, end = _run(seen, step, low, s)
    while first < s:
        for j in range(first, end):
            scores[n + j - first] = dot(own, float32s(keys + j * steps[1], (width,))) * g.scale
        n += end - first
        first, end = _run(seen, step, end, s)
    sink = float32s(g.sinks + 4 * head, (1,))[0] if g.has_sinks else LOWEST
    top = top_of(scores[:n], sink)
    total = powers(scores[:n], top) + (exp2((sink - top) * LOG2_E) if g.has_sinks else ZERO)
    ctx[:], n = ZERO, 0
    first, end = _run(seen, step, low, s)
    while first < s:
        rows = values + first * g.v.strides[1]
        _add(scores[n : n + end - first], rows, g.v.strides[1], ctx)
        n += end - first
        first, end = _run(seen, step, end, s)
    total = ONE if total == ZERO else total
    for i in range(ctx.size):
        ctx[i] /= total


@rowwise
def _run(seen: int, step: int, low: int, high: int) -> Any:
    """From low on the first columns side by side that are seen, from and to; `high` of none.

    seen: where the first column's byte is, and `step` to the next one; 0: all are seen.
    """
    if seen == 0:
        return low, high
    first = low
    while first < high and not uint8s(seen + first * step, 1)[0]:
        aligned = step == 1 and first + 8 <= high and (seen + first) % 8 == 0
        skips = aligned and words(seen + first, 1)[0] == 0
        first += 8 if skips else 1
    end = first
    while end < high and uint8s(seen + end * step, 1)[0]:
        aligned = step == 1 and end + 8 <= high and (seen + end) % 8 == 0
        skips = aligned and words(seen + end, 1)[0] == ALL_SEEN
        end += 8 if skips else 1
    return first, end


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
