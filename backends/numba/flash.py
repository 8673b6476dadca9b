"""The loops of `sdpa`: a head's queries against its keys in tiles, forward and backward.

Arrays are (B, T, H, K). start, stop: heads of keys, of all B G. Query i sees keys i - left to
i + right; pad (B, S) is 0, or -inf at keys that nobody sees, or (B, 0) where all are seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import LOG2_E, rowwise
from xformer.backends.numba.flash_rows import (
    LOWEST,
    ONE,
    ZERO,
    dot,
    multiply,
    seen,
    take_powers,
    take_slopes,
    within,
)
from xformer.backends.numba.gemm import add_product
from xformer.backends.numba.tuning import COLUMNS, LOW, NARROW, WIDE
from xformer.backends.numpy.tiles import FEW, ROWS, TILE

FAR = 1 << 40  # where no window ends


def tile_of(n_queries: int, n_keys: int, right: int) -> tuple[int, int]:
    """Rows and columns of a tile. right: how far a query sees."""
    n_columns = max(1, n_keys) if n_keys <= WIDE else COLUMNS
    n_rows = min(max(LOW[0], n_keys // 16), LOW[1]) if right < n_keys else ROWS[1]
    return min(n_rows, n_queries, TILE // n_columns), n_columns


@rowwise
def attend(
    by: Any,
    start: int,
    stop: int,
    q: Any,
    k: Any,
    v: Any,
    pad: Any,
    left: int,
    right: int,
    scale: Any,
    tile: Any,
    ctx: Any,
    top: Any,
    total: Any,
) -> None:
    """ctx (B, T, H, M) = sum(2^(scores - top) v) / total; top, total (B, H, T) (arXiv:2205.14135).

    Nothing is taken off scores, until their powers sum to too much or too little; but their maximum
    where a query sees few keys, of which one may have all the weight.
    """
    (n, m), shared, (rows, columns) = (q.shape[1], k.shape[1]), q.shape[2] // k.shape[2], tile
    scores = np.empty(rows * columns, np.float32)
    sums = np.empty((rows, v.shape[3]), np.float32)
    for group in range(start, stop):
        b, g = group // k.shape[2], group % k.shape[2]
        keys, values, (least, most) = k[b, :, g], v[b, :, g], seen(pad[b], m)
        if m > columns:
            keys, values = keys.copy(), values.copy()
        for h in range(g * shared, (g + 1) * shared):
            queries, tops, totals = q[b, :, h], top[b, h], total[b, h]
            if m > columns:
                queries = queries.copy()
            shifted = min(m, left + right + 1) < FEW
            for t in range(0, n, rows):
                end = min(t + rows, n)
                low, high = max(least, t - left), min(most, end + right)
                while True:
                    tops[t:end] = LOWEST if shifted else ZERO
                    totals[t:end] = ZERO
                    sums[:] = ZERO
                    s_end = low
                    while s_end < high:
                        s, s_end = s_end, _end(s_end, columns, low, t + right, high)
                        first = max(t, s - right)
                        e = scores[: (end - first) * (s_end - s)].reshape(end - first, s_end - s)
                        at = tops[first:end], totals[first:end], sums[first - t : end - t]
                        add_product(by, scale, queries[first:end], keys[s:s_end].T, False, e)
                        take_powers(e, pad[b, s:s_end], first - s, left, right, shifted, *at)
                        add_product(by, ONE, e, values[s:s_end], True, at[2])
                    if shifted or within(totals[t:end]):
                        break
                    shifted = True
                for i in range(t, end):
                    if totals[i] == ZERO:  # no key to attend to
                        tops[i], totals[i] = ZERO, ONE
                    multiply(sums[i - t], ONE / totals[i], ctx[b, i, h])


@rowwise
def attend_backward(
    by: Any,
    start: int,
    stop: int,
    q: Any,
    k: Any,
    v: Any,
    pad: Any,
    left: int,
    right: int,
    scale: Any,
    tile: Any,
    ctx: Any,
    top: Any,
    total: Any,
    dctx: Any,
    dq: Any,
    dk: Any,
    dv: Any,
) -> None:
    """dq, dk and dv (B, T or S, H or G, .) of dctx (B, T, H, M), and of what `attend` has left.

    dscores = probs * (dprobs - inner) * scale, inner = sum(dprobs * probs) = dctx . ctx.
    """
    (n, m), shared, (rows, columns) = (q.shape[1], k.shape[1]), q.shape[2] // k.shape[2], tile
    scores = np.empty(rows * columns, np.float32)
    slopes = np.empty(rows * columns, np.float32)
    inner = np.empty(n, np.float32)
    dqueries = np.empty((rows, q.shape[3]), np.float32)
    dkeys, dvalues = np.empty((m, q.shape[3]), np.float32), np.empty((m, v.shape[3]), np.float32)
    for group in range(start, stop):
        b, g = group // k.shape[2], group % k.shape[2]
        keys, values, (least, most) = k[b, :, g], v[b, :, g], seen(pad[b], m)
        dkeys[:] = ZERO
        dvalues[:] = ZERO
        if m > columns:
            keys, values = keys.copy(), values.copy()
        for h in range(g * shared, (g + 1) * shared):
            queries, dout = q[b, :, h], dctx[b, :, h]
            if m > columns:
                queries, dout = queries.copy(), dout.copy()
                for i in range(n):
                    inner[i] = dot(dctx[b, i, h], ctx[b, i, h])
            for t in range(0, n, rows):
                end = min(t + rows, n)
                low, high = max(least, t - left), min(most, end + right)
                dqueries[:] = ZERO
                s_end = low
                while s_end < high:
                    s, s_end = s_end, _end(s_end, columns, low, t + right, high)
                    first = max(t, s - right)
                    size, shape = (end - first) * (s_end - s), (end - first, s_end - s)
                    p, ds = scores[:size].reshape(shape), slopes[:size].reshape(shape)
                    own, douts, at = queries[first:end], dout[first:end], slice(first, end)
                    add_product(by, scale * LOG2_E, own, keys[s:s_end].T, False, p)
                    add_product(by, ONE, douts, values[s:s_end].T, False, ds)
                    known = top[b, h, at], total[b, h, at], inner[at], high - low <= columns
                    take_slopes(p, ds, pad[b, s:s_end], first - s, left, right, scale, *known)
                    add_product(by, ONE, p.T, douts, True, dvalues[s:s_end])
                    add_product(by, ONE, ds, keys[s:s_end], True, dqueries[first - t : end - t])
                    add_product(by, ONE, ds.T, own, True, dkeys[s:s_end])
                dq[b, t:end, h] = dqueries[: end - t]
        dk[b, :, g] = dkeys
        dv[b, :, g] = dvalues


@rowwise
def _end(s: int, columns: int, low: int, narrow: int, high: int) -> int:
    """Where the tile of keys ends that begins at s: of low to high, those from `narrow` on NARROW.

    All keys are in one tile, where it has as many columns.
    """
    if NARROW == 0 or high - low <= columns or s + columns <= narrow:
        return min(s + columns, high)
    return min(s + min(NARROW, columns) if s >= narrow else narrow, high)
