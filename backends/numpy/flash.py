"""The parts of `sdpa`: of batch elements and heads, tile by tile, forward and backward.

e = exp(scores - top), total = sum(e) and ctx = e v / total, of which top and total alone are kept
(arXiv:2205.14135). Where all scores are near 0, top is 0 in place of the maximum.
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
    place,
    transposed,
    unfold,
)
from xformer.typing import Array

BOUND = 30.0  # exponents of at most this need no maximum taken off: e^-30 and e^30 have inverses
UNIT = math.log2(math.e) if EXP2 else 1.0  # what exponents are measured in, those of 2 in bits


class Attention(NamedTuple):
    """What goes into all parts, and what they fill in."""

    scores: Scores  # q, k, bias, mask and options
    v: Array  # (B, G, S, M)
    sinks: Array | None  # (H,)
    ctx: Array  # (B, H, T, M)
    top: Array  # (B, H, T, 1)
    total: Array  # (B, H, T, 1), the sink's share in it

    @property
    def bias_matters(self) -> bool:
        """Not where it is the same for all keys, and so for all that the softmax is over."""
        bias = self.scores.bias
        return bias is not None and (bias.shape[3] > 1 or self.sinks is not None)


class Gradients(NamedTuple):
    """What the parts fill in."""

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)
    bias: Array | None
    inner: Array | None  # (B, H, T, 1), over total; for the sinks


def attend(c: Attention, part: Part) -> None:
    """Forward: ctx, top and total of a part."""
    if c.scores.few_queries:
        _at_once(c, part)
    elif c.scores.few_keys or c.sinks is not None or not _plain(c, part):
        _shifted(c, part)


def _at_once(c: Attention, part: Part) -> None:
    """For few queries: in one tile, without a copy of the keys."""
    own, theirs, (t, s) = (part.b, part.h), (part.b, part.g), c.scores.everywhere
    top, total, queries = c.top[own], c.total[own], c.scores.queries(part, t)
    keys = c.scores.k[theirs].mT
    e, _ = c.scores.tile(queries * c.scores.factor(1.0), keys, part, t, s, 1.0)
    c.scores.forbid(e, part, t, s, -np.inf)
    first = _begin(top, total, c.sinks, part)
    _take_off_top(e, top, total, None, first)
    np.exp(e, out=e)
    total += np.add.reduce(e, axis=-1, keepdims=True)
    _without_keys(top, total)
    if c.scores.options.dropout_rate:
        e *= c.scores.kept(part, t, s)
    sums = fold(e, part) @ c.v[theirs]
    np.multiply(unfold(sums, part), _rescaled(c, total), out=c.ctx[own])


def _plain(c: Attention, part: Part) -> bool:
    """With top = 0, two passes less; False where scores are too far from it."""
    own = part.b, part.h
    keys = transposed(c.scores.k[part.b, part.g], c.scores.factor(UNIT), "keys")
    v = c.v[part.b, part.g]
    ctx, total = c.ctx[own], c.total[own]
    c.top[own] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for t, low, high in c.scores.rows(part):
            if low == high:
                return False
            queries, sums = c.scores.queries(part, t), _place_for(ctx[:, :, t], part, "ctx")
            for s in columns(low, high):
                first = s.start == low
                e, _ = c.scores.tile(queries, keys, part, t, s, UNIT)
                _power(c.scores, e, part, t, s)
                _add_product(e, _ones(e), total[:, :, t], first)
                if c.scores.options.dropout_rate:
                    e *= c.scores.kept(part, t, s)
                _add_product(fold(e, part), v[:, :, s], sums, first)
                del e  # the next tile's go to the same memory
            if part.shared > 1:
                ctx[:, :, t] = unfold(sums, part)
    if not (total.min() >= np.exp(-BOUND) and total.max() <= np.exp(BOUND)):
        return False
    ctx *= _rescaled(c, total)
    return True


def _shifted(c: Attention, part: Part) -> None:
    """With the maximum of each query's scores taken off, and put up as keys come."""
    keys = transposed(c.scores.k[part.b, part.g], c.scores.factor(1.0), "keys")
    v = c.v[part.b, part.g]
    for t, low, high in c.scores.rows(part):
        here, queries = (part.b, part.h, t), c.scores.queries(part, t)
        top, total = c.top[here], c.total[here]
        sums = _place_for(c.ctx[here], part, "ctx")
        first = _begin(top, total, c.sinks, part) and low < high
        if not first:
            sums[...] = 0
        for s in columns(low, high):
            e, _ = c.scores.tile(queries, keys, part, t, s, 1.0)
            c.scores.forbid(e, part, t, s, -np.inf)
            _take_off_top(e, top, total, unfold(sums, part), first)
            np.exp(e, out=e)
            _add_product(e, _ones(e), total, first)
            if c.scores.options.dropout_rate:
                e *= c.scores.kept(part, t, s)
            _add_product(fold(e, part), v[:, :, s], sums, first)
            first = False
            del e  # the next tile's go to the same memory
        _without_keys(top, total)
        np.multiply(unfold(sums, part), _rescaled(c, total), out=c.ctx[here])


def _power(scores: Scores, e: Array, part: Part, t: slice, s: slice) -> None:
    """e to these scores, in UNITs; 0 only afterwards, as powers that are 0 take long."""
    (np.exp2 if EXP2 else np.exp)(e, out=e)
    scores.forbid(e, part, t, s, 0)


def _begin(top: Array, total: Array, sinks: Array | None, part: Part) -> bool:
    """Before the first key; whether there is nothing."""
    total[...] = 0
    if sinks is None:
        top[...] = -np.inf
        return True
    top[...] = sinks[part.h, None, None]  # a key of value 0
    total[top > -np.inf] = 1
    return False


def _take_off_top(e: Array, top: Array, total: Array, sums: Array | None, first: bool) -> None:
    """Take the maximum so far off the scores; what earlier keys have summed to follows it."""
    highest = np.maximum.reduce(e, axis=-1, keepdims=True, initial=-np.inf)
    if not first:
        np.maximum(highest, top, out=highest)
    shift = np.where(highest == -np.inf, 0, highest)  # -inf taken off itself is no number
    if not first:
        decay = np.exp(top - shift)
        total *= decay
        if sums is not None:
            sums *= decay
    e -= shift
    top[...] = highest


def _without_keys(top: Array, total: Array) -> None:
    """Of queries that had no key to attend to, and no sink."""
    none = total == 0
    top[none], total[none] = 0, 1


class Work(NamedTuple):
    """What the tiles of a part share, going back."""

    top: Array | None  # None where it is 0
    keys: Array  # (b, g, K, S), times what makes products scores; of few queries they are
    values: Array  # (b, g, M, S)
    value_scale: float  # of `values`: dscores are linear in them, and so are scaled at no cost
    dout: Array  # (b, h, T, M), dctx over total, so that e may stand in the place of probs
    dk: Array  # (b, g, S, K)
    dv: Array  # (b, g, S, M)


def backward(c: Attention, part: Part, dctx: Array, grads: Gradients) -> None:
    """All gradients of a part; none of its keys and values is another's."""
    own, theirs = (part.b, part.h), (part.b, part.g)
    k, v, top = c.scores.k[theirs], c.v[theirs], c.top[own]
    top = top if top.any() else None
    few, once = c.scores.few_queries, c.scores.q.shape[2] <= c.scores.n_rows
    sums = ("dk", grads.k, k), ("dv", grads.v, v)
    value_scale = c.scores.options.scale if not c.bias_matters and c.sinks is None else 1.0
    dout = scratch("dout", c.ctx[own].shape, v.dtype)
    np.multiply(dctx[own], _rescaled(c, c.total[own]), out=dout)
    work = Work(
        top,
        k.mT if few else transposed(k, c.scores.factor(UNIT if top is None else 1.0), "keys"),
        transposed(v, value_scale, "values"),
        value_scale,
        dout,
        *(x[theirs] if once else scratch(name, y.shape, y.dtype) for name, x, y in sums),
    )
    first = True
    for t, low, high in c.scores.rows(part):
        if first:
            for x in (work.dk, work.dv):
                x[:, :, :low] = x[:, :, high:] = 0
        if low < high:
            _rows_back(c, part, work, grads, t, low, high, first)
        else:
            grads.q[part.b, part.h, t] = 0
        first = False
    if not once:
        grads.k[theirs], grads.v[theirs] = work.dk, work.dv


def _rows_back(
    c: Attention,
    part: Part,
    work: Work,
    grads: Gradients,
    t: slice,
    low: int,
    high: int,
    first: bool,
) -> None:
    """The gradients of some queries, and what their keys and values get from them."""
    k, dq_here = c.scores.k[part.b, part.g], grads.q[part.b, part.h, t]
    queries, dout = c.scores.queries(part, t), work.dout[:, :, t]
    dq, dout_rows = _place_for(dq_here, part, "dq"), fold(dout, part)
    inner = None
    if high - low > COLUMNS:
        inner = np.vecdot(dout, c.ctx[part.b, part.h, t])[..., None]
        inner *= (1 - c.scores.options.dropout_rate) * work.value_scale
    for s in columns(low, high):
        e, slope = _recomputed(c, part, work, queries, t, s)
        de = scratch("de", (*queries.shape[:3], e.shape[3]), e.dtype)
        de = unfold(np.matmul(dout_rows, work.values[..., s], out=de), part)
        dropped = e
        if c.scores.options.dropout_rate:
            kept = c.scores.kept(part, t, s)
            dropped = e * kept
            de *= kept
        _add_product(fold(dropped, part).mT, dout_rows, work.dv[:, :, s], first)
        if inner is None:  # all keys are here: exact where one has all the weight
            inner = np.vecdot(e, de)[..., None] / c.total[part.b, part.h, t]
        de -= inner
        de *= e
        if c.bias_matters:
            _add_to(grads.bias, de, part, t, s)
        if work.value_scale != c.scores.options.scale:
            de *= c.scores.options.scale
        if slope is not None:
            de *= slope
        _add_product(fold(de, part), k[:, :, s], dq, s.start == low)
        _add_product(fold(de, part).mT, queries, work.dk[:, :, s], first)
        del e, de, dropped, slope  # the next tile's go to the same memory
    if part.shared > 1:
        dq_here[...] = unfold(dq, part)
    if grads.inner is not None:
        grads.inner[part.b, part.h, t] = inner


def _recomputed(
    c: Attention, part: Part, work: Work, queries: Array, t: slice, s: slice
) -> tuple[Array, Array | None]:
    """e of a tile; the slope of the softcap."""
    unit = UNIT if work.top is None else 1.0
    if c.scores.few_queries:  # as `_at_once` did: another rounding would not fit top and total
        queries = queries * c.scores.factor(unit)
    with np.errstate(over="ignore"):  # of a bias of finfo.min, in UNITs
        e, slope = c.scores.tile(queries, work.keys, part, t, s, unit)
    if work.top is None:
        _power(c.scores, e, part, t, s)
    else:
        c.scores.forbid(e, part, t, s, -np.inf)
        e -= work.top[:, :, t]
        np.exp(e, out=e)
    return e, slope


def _place_for(x: Array, part: Part, name: str) -> Array:
    """Where products for x (b, h, t, .) go: x, or where they are folded, scratch memory."""
    b, h, t, width = x.shape
    r = part.shared
    return x if r == 1 else scratch(name, (b, h // r, r * t, width), x.dtype)


def _rescaled(c: Attention, total: Array) -> Array:
    """1 / total, and what dropout scales up by."""
    rate = c.scores.options.dropout_rate
    return (1 / (1 - rate) if rate < 1 else 1.0) / total


def _ones(e: Array) -> Array:
    return _column(e.shape[3], e.dtype)


@functools.lru_cache(maxsize=32)
def _column(n: int, dtype: np.dtype) -> Array:
    return np.ones((n, 1), dtype)


def _add_product(a: Array, b: Array, out: Array, first: bool) -> None:
    if first:
        np.matmul(a, b, out=out)
    else:
        out += np.matmul(a, b, out=scratch("product", out.shape, out.dtype))


def _add_to(dbias: Array, dscores: Array, part: Part, t: slice, s: slice) -> None:
    axes = tuple(i for i, n in enumerate(dbias.shape) if n == 1)
    dbias[place(dbias, part, t, s)] += np.sum(dscores, axis=axes, keepdims=True)
