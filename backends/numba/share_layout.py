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

REMEMBERED = 64  # numbers of tokens of shares


class Layout(NamedTuple):
    """Of blocks and the tokens of a share; arrays as `share_loops` reads them."""

    starts: Array
    rooms: Array
    dmaps: Array
    dnorms: Array
    totals: Array


class Gradients:
    """Of blocks, one behind the other in memory; whoever keeps one keeps it all."""

    def __init__(self, params: tuple[BlockParams, ...], size: int) -> None:
        self.memory, self._taken = lined((size,), np.float32), 0
        self.blocks = tuple(self._like(own) for own in params)

    def _like(self, params: BlockParams) -> BlockParams:
        q, k, v, o, up, gate, down, *norms = map(self._pair, _pairs(params))
        own = AttentionParams(q, KeyValueParams(k, v), o)
        return BlockParams(norms[0], own, None, None, norms[1], FeedForwardParams(up, down, gate))

    def _pair(self, own: Any) -> Any:
        """LinearParams or NormParams."""
        return own and own._make(map(self._array, own))

    def _array(self, x: Array | None) -> Array | None:
        if x is None:
            return None
        start, self._taken = self._taken, self._taken + x.size
        flat = self.memory[start : self._taken]
        return flat.reshape(x.shape[::-1]).T if _is_sideways(x) else flat.reshape(x.shape)


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


def _distances(params: tuple[BlockParams, ...]) -> tuple[Array, Array, Array]:
    """How far gradients are from the first one, in bytes, and -1 where there is none."""
    dmaps, dnorms, totals, taken = [], [], [], 0
    for own in params:
        rows, first = [], taken
        for pair in _pairs(own):
            at = [-1, -1]
            for i, x in enumerate(pair or ()):
                if x is not None:
                    at[i], taken = 4 * taken, taken + x.size
            rows.append((at[0], bool(pair and not _is_sideways(pair.w)), at[1], False))
        *maps, attn, ffn = rows
        none = (-1, False, -1, False)
        dmaps.append(maps)
        dnorms.append([(dgain, dshift) for dgain, _, dshift, _ in (attn, none, ffn, none)])
        totals.append((4 * first, taken - first))
    return np.array(dmaps), np.array(dnorms), np.array(totals)


def _pairs(own: BlockParams) -> tuple[Any, ...]:
    """Maps in the order of a plan's, and norms; their gradients follow each other so."""
    kv: Any = own.attn.kv
    maps = own.attn.q, kv.k, kv.v, own.attn.o, own.ffn.up, own.ffn.gate, own.ffn.down
    return *maps, own.attn_norm, own.ffn_norm


def _is_sideways(x: Array) -> bool:
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
