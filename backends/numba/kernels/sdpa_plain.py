"""`sdpa` by the loops of `flash`: causal, windows, masks of keys, grouped heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import LOG2_E, rowwise
from xformer.backends.numba.flash import attend, attend_backward
from xformer.backends.numba.flash_rows import LOWEST, ZERO
from xformer.backends.numba.kernels.sdpa_given import N_INS, read
from xformer.backends.numba.program.native import float32s, native, part, uint8s, words


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """ctx, top, total, of powers of 2; the operands. Pieces are heads of keys."""
    a = words(args, 3)
    g = read(args + 8 * 3, args + 8 * (3 + N_INS), memory)
    (b, t, h), groups, m = g.q.shape[:3], g.k.shape[2], g.v.shape[3]
    start, stop = part(b * groups, piece, pieces, 1)
    ctx = float32s(a[0], (b, t, h, m))
    top, total = float32s(a[1], (b, h, t)), float32s(a[2], (b, h, t))
    pad = padding(g, start, stop)
    options = pad, g.left, g.right, g.scale * LOG2_E, g.tile
    attend(g.by, start, stop, g.q, g.k, g.v, *options, ctx, top, total)


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """dq, dk, dv; the operands, ctx, top, total, dctx. Pieces are heads of keys."""
    a = words(args, 3 + N_INS + 4)
    g = read(args + 8 * 3, args + 8 * (3 + N_INS + 4), memory)
    (b, t, h, width), (s, groups), m = g.q.shape, g.k.shape[1:3], g.v.shape[3]
    start, stop = part(b * groups, piece, pieces, 1)
    ctx, dctx = float32s(a[10], (b, t, h, m)), float32s(a[13], (b, t, h, m))
    top, total = float32s(a[11], (b, h, t)), float32s(a[12], (b, h, t))
    dq = float32s(a[0], (b, t, h, width))
    dk, dv = float32s(a[1], (b, s, groups, width)), float32s(a[2], (b, s, groups, m))
    options = padding(g, start, stop), g.left, g.right, g.scale, g.tile
    attend_backward(g.by, start, stop, g.q, g.k, g.v, *options, ctx, top, total, dctx, dq, dk, dv)


@rowwise
def padding(g: Any, start: int, stop: int) -> Any:
    """0, or -inf at keys that nobody sees, of the texts of some heads; of no width without."""
    b, s, groups = g.k.shape[:3]
    first, last = start // groups, (stop + groups - 1) // groups
    hidden = 0
    if g.has_mask:
        for text in range(first, last):
            for j in range(s):
                hidden += 1 - uint8s(g.mask + text * g.mask_steps[0] + j * g.mask_steps[3], 1)[0]
    pad = np.empty((b, s if hidden else 0), np.float32)
    if hidden:
        for text in range(first, last):
            for j in range(s):
                seen = uint8s(g.mask + text * g.mask_steps[0] + j * g.mask_steps[3], 1)[0]
                pad[text, j] = ZERO if seen else LOWEST
    return pad
