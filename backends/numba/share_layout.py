"""Where in memory is what `share` keeps of its layers, needs for them, and gives as gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba import layer, share_loops
from xformer.backends.numba.plan import Plan, Tables
from xformer.backends.numpy.threads import LINE, lined

from xformer.layers.attention import AttentionParams, KeyValueParams
from xformer.layers.block import BlockParams
from xformer.layers.feed_forward import FeedForwardParams
from xformer.typing import Array

FLOAT32 = np.dtype(np.float32)
REMEMBERED = 64  # numbers of tokens of shares


class Layout(NamedTuple):
    """Of blocks and the tokens of a share; arrays as `share_loops` reads them."""

    starts: Array
    rooms: Array
    dmaps: Array
    dnorms: Array
    totals: Array
    pairs: tuple[tuple[_Pair | None, ...], ...]  # of each block, in the order of `_pairs`


class _Pair(NamedTuple):
    """LinearParams or NormParams of gradients: which, and arrays as `np.ndarray` makes them."""

    kind: Any
    spots: tuple[tuple[Any, ...] | None, ...]  # shape, distance and strides


def memory_of(layout: Layout) -> Array:
    """That of gradients of blocks, one behind the other."""
    return lined((int(layout.totals[:, 1].sum()),), np.float32)


def gradients(layout: Layout, memory: Array) -> tuple[BlockParams, ...]:
    """Arrays in it, of which one keeps it all."""

    def array(shape: tuple[int, ...], distance: int, strides: tuple[int, ...] | None) -> Array:
        return np.ndarray(shape, FLOAT32, memory, distance, strides)

    def pair(own: _Pair | None) -> Any:
        return own and own.kind(*[spot and array(*spot) for spot in own.spots])

    return tuple(_block(*map(pair, own)) for own in layout.pairs)


def _block(
    q: Any, k: Any, v: Any, o: Any, up: Any, gate: Any, down: Any, attn: Any, ffn: Any
) -> BlockParams:
    own = AttentionParams(q, KeyValueParams(k, v), o)
    return BlockParams(attn, own, None, None, ffn, FeedForwardParams(up, down, gate))


def layout_of(plan: Plan, params: tuple[BlockParams, ...], n: int) -> Layout:
    """Of n tokens, which the plan remembers: to make it takes Python long."""
    known: Any = plan.layouts
    layout: Layout | None = known.get(n)
    if layout is None:
        tables: Any = plan.tables
        rooms = _rooms(plan, n, int(tables.maps[0, layer.QUERY, layer.N_IN]))
        layout = Layout(_starts(tables, n), rooms, *_distances(params))
        if len(known) >= REMEMBERED:
            known.clear()
        known[n] = layout
    return layout


def _distances(params: tuple[BlockParams, ...]) -> tuple[Array, Array, Array, Any]:
    """How far gradients are from the first one, in bytes, and -1 where there is none."""
    dmaps, dnorms, totals, pairs, taken = [], [], [], [], 0
    for own in params:
        rows, its, first = [], list[_Pair | None](), taken
        for pair in _pairs(own):
            spots: list[tuple[Any, ...] | None] = [None, None]
            for i, x in enumerate(pair or ()):
                if x is not None:
                    spots[i], taken = _spot(x, 4 * taken), taken + x.size
            its.append(pair and _Pair(type(pair), tuple(spots)))
            at = [-1 if spot is None else spot[1] for spot in spots]
            rows.append((at[0], bool(pair and not is_sideways(pair.w)), at[1], False))
        *maps, attn, ffn = rows
        none = (-1, False, -1, False)
        dmaps.append(maps)
        dnorms.append([(dgain, dshift) for dgain, _, dshift, _ in (attn, none, ffn, none)])
        totals.append((4 * first, taken - first))
        pairs.append(tuple(its))
    return np.array(dmaps), np.array(dnorms), np.array(totals), tuple(pairs)


def _spot(like: Array, distance: int) -> tuple[Any, ...]:
    """Of a gradient that lies as its parameter does, but without gaps."""
    strides = (4, 4 * like.shape[0]) if is_sideways(like) else None
    return like.shape, distance, strides


def _pairs(own: BlockParams) -> tuple[Any, ...]:
    """Maps in the order of a plan's, and norms; their gradients follow each other so."""
    kv: Any = own.attn.kv
    maps = own.attn.q, kv.k, kv.v, own.attn.o, own.ffn.up, own.ffn.gate, own.ffn.down
    return *maps, own.attn_norm, own.ffn_norm


def is_sideways(x: Array) -> bool:
    """Whether columns of x lie behind each other, as a tied map's: its gradient lies so, too."""
    return x.ndim == 2 and x.strides[0] < x.strides[1]


def _starts(tables: Tables, n: int) -> Array:
    """Of each layer where its parts begin, of n tokens, and where the last one ends: (L, 9)."""
    maps, heads = tables.maps, tables.sizes[:, layer.HEADS]
    out, d = maps[:, :, layer.N_OUT], np.full(len(maps), maps[0, layer.QUERY, layer.N_IN])
    mapped = out[:, layer.QUERY : layer.OUT].sum(axis=1)
    up, gate = out[:, layer.UP], out[:, layer.GATE]
    columns = d, mapped, maps[:, layer.OUT, layer.N_IN], 2 * heads, d, up, gate, up
    sizes = n * np.stack(columns, axis=1)
    sizes[0, share_loops.X] = 0  # which is the caller's
    ends = np.cumsum(_lines(sizes)).reshape(sizes.shape)
    return np.concatenate((ends - _lines(sizes), ends[:, -1:]), axis=1)


def _rooms(plan: Plan, n: int, d: int) -> Array:
    """Where what a backward needs memory for begins, of n tokens, and where the last one ends."""
    tables: Any = plan.tables
    gate = tables.maps[:, layer.GATE, layer.N_OUT].max()
    widest = max(plan.hidden, plan.ctx), max(plan.hidden, plan.mapped), gate
    return np.cumsum([0, *_lines(n * np.array([d, d, d, d, *widest]))])


def _lines(sizes: Array) -> Array:
    """Whole lines of memory, in numbers."""
    its = LINE // 4
    return -(-sizes // its) * its
