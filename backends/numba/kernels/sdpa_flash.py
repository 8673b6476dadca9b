"""`sdpa` by the loops of `flash`, in tiles of queries and keys: no whole row of scores.

These kernels serve calls with enough queries whose only options are scale, causality, a window and
a mask of keys; heads may share keys. `sdpa_general` serves the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.flash import attend, attend_backward
from xformer.backends.numba.flash_rows import LOWEST, ZERO
from xformer.backends.numba.jit import LOG2_E, rowwise
from xformer.backends.numba.kernels.sdpa_operands import N_INS, read_call
from xformer.backends.numba.program.native import float32s, native, part, uint8s, words


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute ctx of a piece of the B G heads of keys, and what its backward reads.

    outputs: ctx (B, T, H, M), shift and exp_sum (B, H, T); inputs: `Operands`. integers:
    `Attention.numbers`. shift: 0, or the largest score of a row. Scores are times log2(e) here, so
    that exp_sum is a sum of 2^(score - shift).
    """
    a = words(args, 3)
    call = read_call(args + 8 * 3, args + 8 * (3 + N_INS), memory)
    (b, t, h), groups, m = call.q.shape[:3], call.k.shape[2], call.v.shape[3]
    start, stop = part(b * groups, piece, pieces, 1)
    ctx = float32s(a[0], (b, t, h, m))
    shift, exp_sum = float32s(a[1], (b, h, t)), float32s(a[2], (b, h, t))
    pad = key_mask(call, start, stop)
    options = pad, call.left, call.right, call.scale * LOG2_E, call.flash_tile
    attend(call.thread, start, stop, call.q, call.k, call.v, *options, ctx, shift, exp_sum)


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute dq, dk and dv of a piece of the B G heads of keys.

    outputs: dq (B, T, H, K), dk (B, S, G, K), dv (B, S, G, M); inputs: `Operands`, ctx
    (B, T, H, M), shift and exp_sum (B, H, T), dctx (B, T, H, M). integers: `Attention.numbers`.
    """
    a = words(args, 3 + N_INS + 4)
    call = read_call(args + 8 * 3, args + 8 * (3 + N_INS + 4), memory)
    (b, t, h, width), (s, groups), m = call.q.shape, call.k.shape[1:3], call.v.shape[3]
    start, stop = part(b * groups, piece, pieces, 1)
    ctx, dctx = float32s(a[10], (b, t, h, m)), float32s(a[13], (b, t, h, m))
    shift, exp_sum = float32s(a[11], (b, h, t)), float32s(a[12], (b, h, t))
    dq = float32s(a[0], (b, t, h, width))
    dk, dv = float32s(a[1], (b, s, groups, width)), float32s(a[2], (b, s, groups, m))
    options = key_mask(call, start, stop), call.left, call.right, call.scale, call.flash_tile
    thread, q, k, v = call.thread, call.q, call.k, call.v
    attend_backward(thread, start, stop, q, k, v, *options, ctx, shift, exp_sum, dctx, dq, dk, dv)


@rowwise
def key_mask(call: Any, start: int, stop: int) -> Any:
    """Return the mask of keys as `flash` reads it: (B, S), 0 for visible keys and -inf for others.

    Only the sequences of the heads of keys `start` to `stop` are written. If all their keys are
    visible, return (B, 0).
    """
    b, s, groups = call.k.shape[:3]
    first, last = start // groups, (stop + groups - 1) // groups
    n_hidden = 0
    if call.has_mask:
        for i in range(first, last):
            row = call.mask + i * call.mask_strides[0]
            for j in range(s):
                n_hidden += 1 - uint8s(row + j * call.mask_strides[3], 1)[0]
    pad = np.empty((b, s if n_hidden else 0), np.float32)
    if n_hidden:
        for i in range(first, last):
            row = call.mask + i * call.mask_strides[0]
            for j in range(s):
                visible = uint8s(row + j * call.mask_strides[3], 1)[0]
                pad[i, j] = ZERO if visible else LOWEST
    return pad
