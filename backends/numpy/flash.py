"""Flash attention: `sdpa` of one part, tile by tile, forward and backward (arXiv:2205.14135).

For each query, e = exp(scores - top), total = sum(e), ctx = e v / total. top is the maximum of the
scores, or 0 if all scores of the part are near 0. Only ctx, top and total are saved.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from xformer.backends.numpy.threads import scratch
from xformer.backends.numpy.tiles import (
    COLUMNS,
    EXP2,
    Part,
    Scores,
    columns,
    fold,
    tile_index,
    transposed,
    unfold,
)
from xformer.base.typing import Array

BOUND = 30.0  # if total is within e^-30 and e^30, the maximum need not be subtracted
UNIT = math.log2(math.e) if EXP2 else 1.0  # scores are multiplied by it: exp2(UNIT x) = exp(x)


class Attention(NamedTuple):
    """The inputs of `sdpa`, and the arrays for its results. Each part fills in its slices."""

    scores: Scores  # q, k, bias, mask and options
    v: Array  # (B, G, S, M)
    sinks: Array | None  # (H,)
    ctx: Array  # (B, H, T, M)
    top: Array  # (B, H, T, 1), the maximum of a query's scores, or 0
    total: Array  # (B, H, T, 1), the sum of exp(scores - top), with the sink

    @property
    def bias_matters(self) -> bool:
        """Whether the bias changes probabilities: one bias for all keys does so only with sinks."""
        bias = self.scores.bias
        return bias is not None and (bias.shape[3] > 1 or self.sinks is not None)


class Gradients(NamedTuple):
    """The arrays for the gradients. Each part fills in its slices, and adds to bias."""

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)
    bias: Array | None  # the shape of Scores.bias
    inner: Array | None  # (B, H, T, 1), sum(dprobs * probs) / total; None without sinks


def attend(c: Attention, part: Part) -> None:
    """Forward: write ctx, top and total of a part (some batch elements and heads) to `c`."""
    if c.scores.few_queries:
        _in_one_tile(c, part)
    elif c.scores.few_keys or c.sinks is not None or not _without_maximum(c, part):
        _with_running_maximum(c, part)


def _in_one_tile(c: Attention, part: Part) -> None:
    """Forward of a part with few queries: one tile of all queries and keys, no copy of the keys."""
    heads, kv_heads, (t, s) = (part.b, part.h), (part.b, part.g), c.scores.whole
    top, total, queries = c.top[heads], c.total[heads], c.scores.queries(part, t)
    keys = c.scores.k[kv_heads].mT
    e, _ = c.scores.tile(queries * c.scores.factor(1.0), keys, part, t, s, 1.0)
    c.scores.forbid(e, part, t, s, -np.inf)
    first = _initialize(top, total, c.sinks, part)
    _subtract_maximum(e, top, total, None, first)
    np.exp(e, out=e)
    total += np.add.reduce(e, axis=-1, keepdims=True)
    _complete_empty_rows(top, total)
    if c.scores.options.dropout_rate:
        e *= c.scores.dropout_mask(part, t, s)
    sums = fold(e, part) @ c.v[kv_heads]
    np.multiply(unfold(sums, part), _inverse(c, total), out=c.ctx[heads])


def _without_maximum(c: Attention, part: Part) -> bool:
    """Forward of a part with top = 0, not the maximum, which saves two passes over each tile.

    Return False if its results are useless: scores are too far from 0, or a query has no key.
    """
    heads = part.b, part.h
    keys = transposed(c.scores.k[part.b, part.g], c.scores.factor(UNIT), "keys")
    v = c.v[part.b, part.g]
    ctx, total = c.ctx[heads], c.total[heads]
    c.top[heads] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for t, low, high in c.scores.rows(part):
            if low == high:
                return False
            queries, sums = c.scores.queries(part, t), _folded_output(ctx[:, :, t], part, "ctx")
            for s in columns(low, high):
                first = s.start == low
                e, _ = c.scores.tile(queries, keys, part, t, s, UNIT)
                _exponentiate(c.scores, e, part, t, s)
                _add_product(e, _ones(e), total[:, :, t], first)
                if c.scores.options.dropout_rate:
                    e *= c.scores.dropout_mask(part, t, s)
                _add_product(fold(e, part), v[:, :, s], sums, first)
                del e  # so that the next tile reuses its scratch buffer
            if part.shared > 1:
                ctx[:, :, t] = unfold(sums, part)
    if not (total.min() >= np.exp(-BOUND) and total.max() <= np.exp(BOUND)):
        return False
    ctx *= _inverse(c, total)
    return True


def _with_running_maximum(c: Attention, part: Part) -> None:
    """Forward of a part. top is the maximum so far; a tile that raises it rescales the sums."""
    keys = transposed(c.scores.k[part.b, part.g], c.scores.factor(1.0), "keys")
    v = c.v[part.b, part.g]
    for t, low, high in c.scores.rows(part):
        rows, queries = (part.b, part.h, t), c.scores.queries(part, t)
        top, total = c.top[rows], c.total[rows]
        sums = _folded_output(c.ctx[rows], part, "ctx")
        first = _initialize(top, total, c.sinks, part) and low < high
        if not first:
            sums[...] = 0
        for s in columns(low, high):
            e, _ = c.scores.tile(queries, keys, part, t, s, 1.0)
            c.scores.forbid(e, part, t, s, -np.inf)
            _subtract_maximum(e, top, total, unfold(sums, part), first)
            np.exp(e, out=e)
            _add_product(e, _ones(e), total, first)
            if c.scores.options.dropout_rate:
                e *= c.scores.dropout_mask(part, t, s)
            _add_product(fold(e, part), v[:, :, s], sums, first)
            first = False
            del e  # so that the next tile reuses its scratch buffer
        _complete_empty_rows(top, total)
        np.multiply(unfold(sums, part), _inverse(c, total), out=c.ctx[rows])


def _exponentiate(scores: Scores, e: Array, part: Part, t: slice, s: slice) -> None:
    """Replace e, the scores of a tile times UNIT, by exp(scores), and forbidden ones by 0.

    Forbidden scores are not set to -inf first, because exp(-inf) is slow.
    """
    (np.exp2 if EXP2 else np.exp)(e, out=e)
    scores.forbid(e, part, t, s, 0)


def _initialize(top: Array, total: Array, sinks: Array | None, part: Part) -> bool:
    """Set top and total (b, h, t, 1) to the values before the first key.

    Return whether total is 0, so that the first tile need not be added to it: there is no sink.
    """
    total[...] = 0
    if sinks is None:
        top[...] = -np.inf
        return True
    top[...] = sinks[part.h, None, None]  # a sink is a key whose value is 0
    total[top > -np.inf] = 1
    return False


def _subtract_maximum(e: Array, top: Array, total: Array, sums: Array | None, first: bool) -> None:
    """Update top with the scores e, subtract it from e, and rescale total and sums to the new top.

    sums: (b, h, t, M), e v of the earlier tiles; None if there is one tile
    first: whether there are no earlier tiles and no sink
    """
    highest = np.maximum.reduce(e, axis=-1, keepdims=True, initial=-np.inf)
    if not first:
        np.maximum(highest, top, out=highest)
    shift = np.where(highest == -np.inf, 0, highest)  # -inf - -inf would be NaN
    if not first:
        decay = np.exp(top - shift)
        total *= decay
        if sums is not None:
            sums *= decay
    e -= shift
    top[...] = highest


def _complete_empty_rows(top: Array, total: Array) -> None:
    """Set top to 0 and total to 1 for queries that may attend to no key and have no sink."""
    is_empty = total == 0
    top[is_empty], total[is_empty] = 0, 1


class PartBackward(NamedTuple):
    """The arrays of one part that the backward of all its tiles uses."""

    top: Array | None  # (b, h, T, 1); None: it is 0
    keys: Array  # (b, g, K, S), times `Scores.factor`; for few queries unscaled
    values: Array  # (b, g, M, S), times value_scale
    value_scale: float  # the scale of scores if possible: dscores are linear in `values`
    dout: Array  # (b, h, T, M), dctx / total: with it, e takes the place of probabilities
    dk: Array  # (b, g, S, K)
    dv: Array  # (b, g, S, M)


def backward(c: Attention, part: Part, dctx: Array, grads: Gradients) -> None:
    """Write the gradients of a part to `grads`, and add to the gradient of the bias.

    dctx: (B, H, T, M). No other part has these keys and values, so dk and dv are not shared.
    """
    heads, kv_heads = (part.b, part.h), (part.b, part.g)
    k, v, top = c.scores.k[kv_heads], c.v[kv_heads], c.top[heads]
    top = top if top.any() else None
    few, one_tile = c.scores.few_queries, c.scores.q.shape[2] <= c.scores.n_rows
    sums = ("dk", grads.k, k), ("dv", grads.v, v)
    value_scale = c.scores.options.scale if not c.bias_matters and c.sinks is None else 1.0
    dout = scratch("dout", c.ctx[heads].shape, v.dtype)
    np.multiply(dctx[heads], _inverse(c, c.total[heads]), out=dout)
    arrays = PartBackward(
        top,
        k.mT if few else transposed(k, c.scores.factor(UNIT if top is None else 1.0), "keys"),
        transposed(v, value_scale, "values"),
        value_scale,
        dout,
        *(x[kv_heads] if one_tile else scratch(name, y.shape, y.dtype) for name, x, y in sums),
    )
    first = True
    for t, low, high in c.scores.rows(part):
        if first:
            for x in (arrays.dk, arrays.dv):
                x[:, :, :low] = x[:, :, high:] = 0
        if low < high:
            _backward_of_queries(c, part, arrays, grads, t, low, high, first)
        else:
            grads.q[part.b, part.h, t] = 0
        first = False
    if not one_tile:
        grads.k[kv_heads], grads.v[kv_heads] = arrays.dk, arrays.dv


def _backward_of_queries(
    c: Attention,
    part: Part,
    arrays: PartBackward,
    grads: Gradients,
    t: slice,
    low: int,
    high: int,
    first: bool,
) -> None:
    """Compute dq of the queries t, and add to dk and dv of the keys [low, high).

    first: whether these are the part's first queries, so that dk and dv are overwritten
    """
    k, dq_out = c.scores.k[part.b, part.g], grads.q[part.b, part.h, t]
    queries, dout = c.scores.queries(part, t), arrays.dout[:, :, t]
    dq, dout_rows = _folded_output(dq_out, part, "dq"), fold(dout, part)
    inner = None
    if high - low > COLUMNS:
        inner = np.vecdot(dout, c.ctx[part.b, part.h, t])[..., None]
        inner *= (1 - c.scores.options.dropout_rate) * arrays.value_scale
    for s in columns(low, high):
        e, cap_derivative = _recomputed(c, part, arrays, queries, t, s)
        de = scratch("de", (*queries.shape[:3], e.shape[3]), e.dtype)
        de = unfold(np.matmul(dout_rows, arrays.values[..., s], out=de), part)
        dropped = e
        if c.scores.options.dropout_rate:
            keep = c.scores.dropout_mask(part, t, s)
            dropped = e * keep
            de *= keep
        _add_product(fold(dropped, part).mT, dout_rows, arrays.dv[:, :, s], first)
        if inner is None:  # the tile has all keys; this is exact if one key has all the weight
            inner = np.vecdot(e, de)[..., None] / c.total[part.b, part.h, t]
        de -= inner
        de *= e
        if c.bias_matters:
            _add_to_dbias(grads.bias, de, part, t, s)
        if arrays.value_scale != c.scores.options.scale:
            de *= c.scores.options.scale
        if cap_derivative is not None:
            de *= cap_derivative
        _add_product(fold(de, part), k[:, :, s], dq, s.start == low)
        _add_product(fold(de, part).mT, queries, arrays.dk[:, :, s], first)
        del e, de, dropped, cap_derivative  # so that the next tile reuses their scratch buffers
    if part.shared > 1:
        dq_out[...] = unfold(dq, part)
    if grads.inner is not None:
        grads.inner[part.b, part.h, t] = inner


def _recomputed(
    c: Attention, part: Part, arrays: PartBackward, queries: Array, t: slice, s: slice
) -> tuple[Array, Array | None]:
    """Return exp(scores - top) of the tile (t, s), and the derivative of the softcap or None."""
    unit = UNIT if arrays.top is None else 1.0
    if c.scores.few_queries:  # as `_in_one_tile`: e must be rounded as in top and total
        queries = queries * c.scores.factor(unit)
    with np.errstate(over="ignore"):  # a bias of finfo.min times UNIT overflows
        e, cap_derivative = c.scores.tile(queries, arrays.keys, part, t, s, unit)
    if arrays.top is None:
        _exponentiate(c.scores, e, part, t, s)
    else:
        c.scores.forbid(e, part, t, s, -np.inf)
        e -= arrays.top[:, :, t]
        np.exp(e, out=e)
    return e, cap_derivative


def _folded_output(x: Array, part: Part, name: str) -> Array:
    """Return an array for the values of fold(x): x (b, h, t, .) itself if r is 1, else scratch."""
    b, h, t, width = x.shape
    r = part.shared
    return x if r == 1 else scratch(name, (b, h // r, r * t, width), x.dtype)


def _inverse(c: Attention, total: Array) -> Array:
    """Return 1 / total, times 1 / (1 - dropout_rate)."""
    rate = c.scores.options.dropout_rate
    return (1 / (1 - rate) if rate < 1 else 1.0) / total


def _ones(e: Array) -> Array:
    """Return a column of ones: e @ ones is the sum over keys."""
    return _column(e.shape[3], e.dtype)


@functools.lru_cache(maxsize=32)
def _column(n: int, dtype: np.dtype) -> Array:
    return np.ones((n, 1), dtype)


def _add_product(a: Array, b: Array, out: Array, first: bool) -> None:
    """Compute out[...] = a b if `first`, else out += a b."""
    if first:
        np.matmul(a, b, out=out)
    else:
        out += np.matmul(a, b, out=scratch("product", out.shape, out.dtype))


def _add_to_dbias(dbias: Array, dscores: Array, part: Part, t: slice, s: slice) -> None:
    """Add dscores (b, h, t, s), summed over the axes that dbias broadcasts, to its tile."""
    axes = tuple(i for i, n in enumerate(dbias.shape) if n == 1)
    dbias[tile_index(dbias, part, t, s)] += np.sum(dscores, axis=axes, keepdims=True)
