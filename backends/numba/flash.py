"""Flash attention for `sdpa`: loops over tiles of scores, forward and backward.

Arguments of both loops:

by            first argument of `add_product`
start, stop   range of pairs (batch element, key head), numbered b * G + g
q, k, v       (B, T, H, K), (B, S, G, K), (B, S, G, M); H / G query heads share a key head
pad           (B, S): 0, or -inf for a masked key; (B, 0) if no key is masked
left, right   query i attends to the keys i - left to i + right
tile          number of rows (queries) and columns (keys) of a tile
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.flash_rows import (
    LOWEST,
    ONE,
    ZERO,
    are_safe,
    copy,
    dot,
    multiply,
    take_dscores,
    take_powers,
    unmasked,
)
from xformer.backends.numba.jit import LOG2_E, rowwise
from xformer.backends.numba.matmul import add_product
from xformer.backends.numba.tuning import COLUMNS, LOW, NARROW, WIDE
from xformer.backends.numpy.tiles import FEW, ROWS, TILE

FAR = 1 << 40  # stands for an unlimited `left` or `right`


def tile_of(n_queries: int, n_keys: int, right: int) -> tuple[int, int]:
    """Return the number of rows and columns of a tile. right: as in the module's docstring."""
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
    """Compute ctx = sum(2^(scores - top) v) / total, scores = scale q k^T (arXiv:2205.14135).

    ctx (B, T, H, M), top, total (B, H, T): outputs. scale: includes the factor log2(e).
    top is 0 at first. If the sum of powers of a row becomes too large or too small, its tile of
    rows is computed again with top = the row's maximum; so are all later rows of this head. If a
    query attends to fewer than `FEW` keys, top is the maximum from the start, since one key may
    have all the weight.
    """
    (n, m), shared, (rows, columns) = (q.shape[1], k.shape[1]), q.shape[2] // k.shape[2], tile
    scores = np.empty(rows * columns, np.float32)
    sums = np.empty((rows, v.shape[3]), np.float32)
    for group in range(start, stop):
        b, g = group // k.shape[2], group % k.shape[2]
        keys, values, (least, most) = k[b, :, g], v[b, :, g], unmasked(pad[b], m)
        if m > columns:
            keys, values = keys.copy(), values.copy()
        for h in range(g * shared, (g + 1) * shared):
            queries, tops, totals = q[b, :, h], top[b, h], total[b, h]
            if m > columns:
                queries = queries.copy()
            subtracts_maximum = min(m, left + right + 1) < FEW
            for t in range(0, n, rows):
                end = min(t + rows, n)
                low, high = max(least, t - left), min(most, end + right)
                while True:
                    tops[t:end] = LOWEST if subtracts_maximum else ZERO
                    totals[t:end] = ZERO
                    sums[:] = ZERO
                    s_end = low
                    while s_end < high:
                        s, s_end = s_end, _end(s_end, columns, low, t + right, high)
                        first = max(t, s - right)
                        e = scores[: (end - first) * (s_end - s)].reshape(end - first, s_end - s)
                        row_sums = sums[first - t : end - t]
                        rows_of_tile = tops[first:end], totals[first:end], row_sums
                        window = pad[b, s:s_end], first - s, left, right
                        add_product(by, scale, queries[first:end], keys[s:s_end].T, False, e)
                        take_powers(e, *window, subtracts_maximum, *rows_of_tile)
                        add_product(by, ONE, e, values[s:s_end], True, row_sums)
                    if subtracts_maximum or are_safe(totals[t:end]):
                        break
                    subtracts_maximum = True
                for i in range(t, end):
                    if totals[i] == ZERO:  # all keys of the query are masked
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
    """Compute dq, dk and dv (shapes of q, k, v) from dctx and ctx (B, T, H, M).

    top, total: outputs of `attend`. scale: without the factor log2(e).
    dscores = probs * (dprobs - inner) * scale, inner = sum(dprobs * probs) = dctx . ctx.
    """
    (n, m), shared, (rows, columns) = (q.shape[1], k.shape[1]), q.shape[2] // k.shape[2], tile
    scores = np.empty(rows * columns, np.float32)
    dscores = np.empty(rows * columns, np.float32)
    inner = np.empty(n, np.float32)
    dqueries = np.empty((rows, q.shape[3]), np.float32)
    dkeys, dvalues = np.empty((m, q.shape[3]), np.float32), np.empty((m, v.shape[3]), np.float32)
    for group in range(start, stop):
        b, g = group // k.shape[2], group % k.shape[2]
        keys, values, (least, most) = k[b, :, g], v[b, :, g], unmasked(pad[b], m)
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
                    p, ds = scores[:size].reshape(shape), dscores[:size].reshape(shape)
                    tile_queries, douts, at = queries[first:end], dout[first:end], slice(first, end)
                    add_product(by, scale * LOG2_E, tile_queries, keys[s:s_end].T, False, p)
                    add_product(by, ONE, douts, values[s:s_end].T, False, ds)
                    saved = top[b, h, at], total[b, h, at], inner[at], high - low <= columns
                    take_dscores(p, ds, pad[b, s:s_end], first - s, left, right, scale, *saved)
                    add_product(by, ONE, p.T, douts, True, dvalues[s:s_end])
                    add_product(by, ONE, ds, keys[s:s_end], True, dqueries[first - t : end - t])
                    add_product(by, ONE, ds.T, tile_queries, True, dkeys[s:s_end])
                for i in range(t, end):
                    copy(dqueries[i - t], dq[b, i, h])
        for j in range(m):
            copy(dkeys[j], dk[b, j, g])
            copy(dvalues[j], dv[b, j, g])


@rowwise
def _end(s: int, columns: int, low: int, narrow: int, high: int) -> int:
    """Return where the tile of keys that begins at key s ends.

    The queries attend to keys low to high; if a tile has enough columns, it holds all of them. Not
    every query attends to the keys from `narrow` on, whose tiles have at most NARROW columns.
    """
    if NARROW == 0 or high - low <= columns or s + columns <= narrow:
        return min(s + columns, high)
    return min(s + min(NARROW, columns) if s >= narrow else narrow, high)
