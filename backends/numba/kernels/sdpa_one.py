"""`sdpa` of one query, as in decoding: each key that it sees is read once, and no other."""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.compiled import LOG2_E, exp2, rowwise
from xformer.backends.numba.flash_rows import LOWEST, ONE, ZERO, dot
from xformer.backends.numba.kernels.sdpa_given import N_INS, read
from xformer.backends.numba.program.native import float32s, native, part, uint8s, words


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
    low, own = max(0, -g.left), float32s(query, (width,))
    sink = float32s(g.sinks + 4 * head, (1,))[0] if g.has_sinks else LOWEST
    top = sink
    for j in range(low, s):
        scores[j] = LOWEST
        if not g.has_mask or uint8s(seen + j * step, 1)[0]:
            scores[j] = dot(own, float32s(keys + j * steps[1], (width,))) * g.scale
            top = top if top >= scores[j] else scores[j]  # NaN, which is not less, too
    top = ZERO if top == LOWEST else top
    ctx[:] = ZERO
    total = exp2((sink - top) * LOG2_E) if g.has_sinks else ZERO
    for j in range(low, s):
        if scores[j] == LOWEST:
            continue
        e, row = exp2((scores[j] - top) * LOG2_E), float32s(values + j * g.v.strides[1], ctx.shape)
        total += e
        for i in range(ctx.size):
            ctx[i] += e * row[i]
    total = ONE if total == ZERO else total
    for i in range(ctx.size):
        ctx[i] /= total
