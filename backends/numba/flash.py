"""The loops of `sdpa`: a head's queries against its keys in tiles, forward and backward.

Arrays are (B, T, H, K). start, stop: heads of keys, of all B G. Query i sees keys i - left to
i + right; pad (B, S) is 0, or -inf at keys that nobody sees, or (0, S) where there are none.
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
        g, shifted = h // shared, min(m, left + right + 1) < FEW
        queries, keys, values = q[b, :, h], k[b, :, g], v[b, :, g]
        if m > columns:
            queries, keys, values = queries.copy(), keys.copy(), values.copy()
        for t in range(0, n, rows):
            end = min(t + rows, n)
            while True:
                top[b, h, t:end] = LOWEST if shifted else ZERO
                total[b, h, t:end] = ZERO
                sums[:] = ZERO
                for s in range(max(0, t - left), min(m, end + right), columns):
                    s_end, first = min(s + columns, m, end + right), max(t, s - right)
                    e = scores[: (end - first) * (s_end - s)].reshape(end - first, s_end - s)
                    add_product(gemm, scale, queries[first:end], keys[s:s_end].T, ZERO, e)
                    for i in range(first, end):
                        low, high = max(0, i - left - s), min(s_end - s, i + right + 1 - s)
                        row = e[i - first]
                        row[:low] = ZERO
                        row[high:] = ZERO
                        if len(pad):
                            _add(row[low:high], pad[b, s + low : s + high])
                        if shifted:
                            highest = _highest(row[low:high])
                            if highest > top[b, h, i]:
                                decay = exp2(top[b, h, i] - highest)
                                total[b, h, i] *= decay
                                _multiply(sums[i - t], decay, sums[i - t])
                                top[b, h, i] = highest
                        total[b, h, i] += _powers(row[low:high], top[b, h, i])
                    add_product(gemm, ONE, e, values[s:s_end], ONE, sums[first - t : end - t])
                if shifted or _within(total[b, h, t:end]):
                    break
                shifted = True
            for i in range(t, end):
                if total[b, h, i] == ZERO:  # no key to attend to
                    total[b, h, i] = ONE
                _multiply(sums[i - t], ONE / total[b, h, i], ctx[b, i, h])


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
    gradients = np.empty(rows * columns, np.float32)
    dqueries = np.empty((rows, q.shape[3]), np.float32)
    dkeys, dvalues = np.empty((m, q.shape[3]), np.float32), np.empty((m, v.shape[3]), np.float32)
    for head in range(start * shared, stop * shared):
        b, h = head // q.shape[2], head % q.shape[2]
        g = h // shared
        queries, keys, values, dout = q[b, :, h], k[b, :, g], v[b, :, g], dctx[b, :, h]
        if m > columns:
            queries, keys, values = queries.copy(), keys.copy(), values.copy()
            dout = dout.copy()
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
                e, de = scores[:size].reshape(shape), gradients[:size].reshape(shape)
                own, douts = queries[first:end], dout[first:end]
                add_product(gemm, scale * LOG2_E, own, keys[s:s_end].T, ZERO, e)
                add_product(gemm, ONE, douts, values[s:s_end].T, ZERO, de)
                for i in range(first, end):
                    low, high = max(0, i - left - s), min(s_end - s, i + right + 1 - s)
                    p, d = e[i - first], de[i - first]
                    for x in (p, d):
                        x[:low] = ZERO
                        x[high:] = ZERO
                    p, d = p[low:high], d[low:high]
                    if len(pad):
                        _add(p, pad[b, s + low : s + high])
                    share = ONE / total[b, h, i]
                    if whole:  # exact where one key has all the weight
                        inner = _probabilities(p, d, top[b, h, i], share)
                        _slopes(p, d, inner, scale)
                    else:
                        inner = _dot(dctx[b, i, h], ctx[b, i, h])
                        _probabilities_and_slopes(p, d, top[b, h, i], share, inner, scale)
                add_product(gemm, ONE, e.T, douts, ONE, dvalues[s:s_end])
                add_product(gemm, ONE, de, keys[s:s_end], ONE, dqueries[first - t : end - t])
                add_product(gemm, ONE, de.T, own, ONE, dkeys[s:s_end])
            dq[b, t:end, h] = dqueries[: end - t]
        if (h + 1) % shared == 0:
            dk[b, :, g] = dkeys
            dv[b, :, g] = dvalues


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
def _probabilities(p: Any, d: Any, top: Any, share: Any) -> Any:
    """p = share 2^(p - top); the sum of p d."""
    inner = ZERO
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
def _probabilities_and_slopes(p: Any, d: Any, top: Any, share: Any, inner: Any, scale: Any) -> None:
    for j in range(p.size):
        e = exp2(p[j] - top) * share
        p[j] = e
        d[j] = e * (d[j] - inner) * scale
