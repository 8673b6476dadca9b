"""The loops of `sdpa`: a head's queries against its keys in tiles, forward and backward.

Arrays are (B, T, H, K). start, stop: heads of keys, of all B G. Query i sees keys i - left to
i + right; pad (B, S) is 0, or -inf at keys that nobody sees, or (B, 0) where all are seen.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from xformer.backends.numba.compiled import LOG2_E, exp2, rowwise, rowwise_of
from xformer.backends.numba.gemm import add_product
from xformer.backends.numpy.tiles import FEW

ONE, ZERO = np.float32(1), np.float32(0)
LOWEST = np.float32(np.finfo(np.float32).min / 2)  # -inf taken off itself would be no number
LEAST, MOST = np.float32(2.0**-40), np.float32(2.0**40)  # sums of powers with nothing taken off
SIGN, OTHERS = np.int32(31), np.int32(0x7FFFFFFF)  # of a number's bits
LOWEST_BITS = np.int32(LOWEST.view(np.int32) ^ OTHERS)


def _array(ndim: int, layout: str, changes: bool) -> types.Array:
    return types.Array(types.float32, ndim, layout, readonly=not changes)


INT, REAL, GIVEN = types.int64, types.float32, _array(4, "A", changes=False)
OPTIONS = _array(2, "A", False), INT, INT, REAL, types.UniTuple(INT, 2)
STATISTICS = _array(3, "C", True), _array(3, "C", True)
FILLED = _array(4, "C", True)
ATTEND = types.void(INT, INT, INT, GIVEN, GIVEN, GIVEN, *OPTIONS, FILLED, *STATISTICS)
BACKWARD = types.void(*ATTEND.args, _array(4, "C", False), FILLED, FILLED, FILLED)


@functools.cache
def loops() -> tuple[Any, Any]:
    """`_attend` and `_backward` as machine code, one for all layouts of arrays."""
    return rowwise_of(ATTEND)(_attend), rowwise_of(BACKWARD)(_backward)


def _attend(
    gemm: Any,
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
    """ctx (B, T, H, M), and top and total (B, H, T), of which powers of 2 are.

    Nothing is taken off scores, until their powers sum to too much or too little; but their maximum
    where a query sees few keys, of which one may have all the weight.
    """
    (n, m), shared, (rows, columns) = (q.shape[1], k.shape[1]), q.shape[2] // k.shape[2], tile
    scores = np.empty(rows * columns, np.float32)
    sums = np.empty((rows, v.shape[3]), np.float32)
    for head in range(start * shared, stop * shared):
        b, h = head // q.shape[2], head % q.shape[2]
        tops, totals, shifted = top[b, h], total[b, h], min(m, left + right + 1) < FEW
        queries, keys, values = q[b, :, h], k[b, :, h // shared], v[b, :, h // shared]
        if m > columns:
            queries, keys, values = queries.copy(), keys.copy(), values.copy()
        for t in range(0, n, rows):
            end = min(t + rows, n)
            while True:
                tops[t:end] = LOWEST if shifted else ZERO
                totals[t:end] = ZERO
                sums[:] = ZERO
                for s in range(max(0, t - left), min(m, end + right), columns):
                    s_end, first = min(s + columns, m, end + right), max(t, s - right)
                    e = scores[: (end - first) * (s_end - s)].reshape(end - first, s_end - s)
                    own, their = sums[first - t : end - t], (tops[first:end], totals[first:end])
                    add_product(gemm, scale, queries[first:end], keys[s:s_end].T, ZERO, e)
                    _take_powers(e, pad[b, s:s_end], first - s, left, right, shifted, *their, own)
                    add_product(gemm, ONE, e, values[s:s_end], ONE, own)
                if shifted or _within(totals[t:end]):
                    break
                shifted = True
            for i in range(t, end):
                if totals[i] == ZERO:  # no key to attend to
                    totals[i] = ONE
                _multiply(sums[i - t], ONE / totals[i], ctx[b, i, h])


@rowwise
def _take_powers(
    e: Any,
    pad: Any,
    ahead: int,
    left: int,
    right: int,
    shifted: bool,
    top: Any,
    total: Any,
    sums: Any,
) -> None:
    """Powers of a tile's scores less top; a top that rises takes total and sums with it.

    ahead: from the number of the first key to that of the first query.
    """
    for i in range(len(e)):
        low, high = _reach(e, ahead + i, left, right)
        row = e[i]
        row[:low] = ZERO
        row[high:] = ZERO
        if pad.size:
            _add(row[low:high], pad[low:high])
        if shifted:
            highest = _highest(row[low:high])
            if highest > top[i]:
                decay = exp2(top[i] - highest)
                total[i] *= decay
                _multiply(sums[i], decay, sums[i])
                top[i] = highest
        total[i] += _powers(row[low:high], top[i])


def _backward(
    gemm: Any,
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
    """dq, dk and dv of what `attend` has left."""
    (n, m), shared, (rows, columns) = (q.shape[1], k.shape[1]), q.shape[2] // k.shape[2], tile
    scores = np.empty(rows * columns, np.float32)
    slopes = np.empty(rows * columns, np.float32)
    inner = np.empty(n, np.float32)
    dqueries = np.empty((rows, q.shape[3]), np.float32)
    dkeys, dvalues = np.empty((m, q.shape[3]), np.float32), np.empty((m, v.shape[3]), np.float32)
    for head in range(start * shared, stop * shared):
        b, h = head // q.shape[2], head % q.shape[2]
        g = h // shared
        queries, keys, values, dout = q[b, :, h], k[b, :, g], v[b, :, g], dctx[b, :, h]
        if m > columns:
            queries, keys, values = queries.copy(), keys.copy(), values.copy()
            dout = dout.copy()
            for i in range(n):
                inner[i] = _dot(dctx[b, i, h], ctx[b, i, h])
        if h % shared == 0:
            dkeys[:] = ZERO
            dvalues[:] = ZERO
        for t in range(0, n, rows):
            end = min(t + rows, n)
            dqueries[:] = ZERO
            whole = min(m, end + right) - max(0, t - left) <= columns
            for s in range(max(0, t - left), min(m, end + right), columns):
                s_end, first = min(s + columns, m, end + right), max(t, s - right)
                size, shape = (end - first) * (s_end - s), (end - first, s_end - s)
                p, ds = scores[:size].reshape(shape), slopes[:size].reshape(shape)
                own, douts, at = queries[first:end], dout[first:end], slice(first, end)
                add_product(gemm, scale * LOG2_E, own, keys[s:s_end].T, ZERO, p)
                add_product(gemm, ONE, douts, values[s:s_end].T, ZERO, ds)
                known = top[b, h, at], total[b, h, at], inner[at]
                _take_slopes(p, ds, pad[b, s:s_end], first - s, left, right, scale, *known, whole)
                add_product(gemm, ONE, p.T, douts, ONE, dvalues[s:s_end])
                add_product(gemm, ONE, ds, keys[s:s_end], ONE, dqueries[first - t : end - t])
                add_product(gemm, ONE, ds.T, own, ONE, dkeys[s:s_end])
            dq[b, t:end, h] = dqueries[: end - t]
        if (h + 1) % shared == 0:
            dk[b, :, g] = dkeys
            dv[b, :, g] = dvalues


@rowwise
def _take_slopes(
    p: Any,
    ds: Any,
    pad: Any,
    ahead: int,
    left: int,
    right: int,
    scale: Any,
    top: Any,
    total: Any,
    inner: Any,
    whole: bool,
) -> None:
    """A tile's probabilities of its scores, and dscores of dprobs.

    whole: it has all keys, and so dscores are exact where one has all the weight.
    """
    for i in range(len(p)):
        low, high = _reach(p, ahead + i, left, right)
        for x in (p[i], ds[i]):
            x[:low] = ZERO
            x[high:] = ZERO
        probs, dscores = p[i, low:high], ds[i, low:high]
        if pad.size:
            _add(probs, pad[low:high])
        if whole:
            _slopes(probs, dscores, _probabilities(probs, dscores, top[i], total[i]), scale)
        else:
            _probabilities_and_slopes(probs, dscores, top[i], total[i], inner[i], scale)


@rowwise
def _reach(tile: Any, ahead: int, left: int, right: int) -> Any:
    """From which to which column a row goes, whose own key is column `ahead`."""
    return max(0, ahead - left), min(tile.shape[1], ahead + right + 1)


@rowwise
def _add(x: Any, y: Any) -> None:
    for j in range(x.size):
        x[j] += y[j]


@rowwise
def _multiply(x: Any, factor: Any, out: Any) -> None:
    for j in range(x.size):
        out[j] = factor * x[j]


@rowwise
def _dot(x: Any, y: Any) -> Any:
    total = ZERO
    for j in range(x.size):
        total += x[j] * y[j]
    return total


@rowwise
def _highest(x: Any) -> Any:
    """Of LOWEST and these; by bits, which are in order as whole numbers are and never NaN."""
    highest = LOWEST_BITS
    for j in range(x.size):
        bits = np.float32(x[j]).view(np.int32)
        highest = max(highest, bits ^ ((bits >> SIGN) & OTHERS))
    return np.int32(highest ^ ((highest >> SIGN) & OTHERS)).view(np.float32)


@rowwise
def _within(totals: Any) -> Any:
    return totals.min() >= LEAST and totals.max() <= MOST


@rowwise
def _powers(x: Any, top: Any) -> Any:
    """x = 2^(x - top); their sum."""
    total = ZERO
    for j in range(x.size):
        e = exp2(x[j] - top)
        x[j] = e
        total += e
    return total


@rowwise
def _probabilities(p: Any, d: Any, top: Any, total: Any) -> Any:
    """p = 2^(p - top) / total; the sum of p d."""
    inner, share = ZERO, ONE / total
    for j in range(p.size):
        e = exp2(p[j] - top) * share
        p[j] = e
        inner += e * d[j]
    return inner


@rowwise
def _slopes(p: Any, d: Any, inner: Any, scale: Any) -> None:
    for j in range(p.size):
        d[j] = p[j] * (d[j] - inner) * scale


@rowwise
def _probabilities_and_slopes(p: Any, d: Any, top: Any, total: Any, inner: Any, scale: Any) -> None:
    share = ONE / total
    for j in range(p.size):
        e = exp2(p[j] - top) * share
        p[j] = e
        d[j] = e * (d[j] - inner) * scale
