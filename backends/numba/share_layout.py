"""Where in memory is what `share` keeps of its layers, needs for them, and gives as gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba import layer, share_loops
from xformer.backends.numba.atomic import place
from xformer.backends.numba.plan import Plan, Tables
from xformer.backends.numpy.threads import LINE, lined

from xformer import tree
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
        attn, ffn = params.attn, params.ffn
        kv: Any = attn.kv
        maps = map(self._pair, (attn.q, kv.k, kv.v, attn.o, ffn.up, ffn.down, ffn.gate))
        q, k, v, o, up, down, gate = maps
        own = AttentionParams(q, KeyValueParams(k, v), o)
        norms = self._pair(params.attn_norm), self._pair(params.ffn_norm)
        return BlockParams(norms[0], own, None, None, norms[1], FeedForwardParams(up, down, gate))

    def _pair(self, own: Any) -> Any:
        """LinearParams or NormParams."""
        return own and own._make(map(self._array, own))

    def _array(self, x: Array | None) -> Array | None:
        """Lying in memory as x does: a tied map's lies sideways."""
        if x is None:
            return None
        start, self._taken = self._taken, self._taken + x.size
        flat = self.memory[start : self._taken]
        sideways = x.ndim == 2 and x.strides[0] < x.strides[1]
        return flat.reshape(x.shape[::-1]).T if sideways else flat.reshape(x.shape)


def layout_of(plan: Plan, params: tuple[BlockParams, ...], n: int) -> Layout:
    """Of n tokens, which the plan remembers: to make it takes Python long."""
    known: Any = plan.layouts
    if n not in known:
        if len(known) == REMEMBERED:
            known.clear()
        known[n] = _made(plan, params, n)
    layout: Layout = known[n]
    return layout


def _made(plan: Plan, params: tuple[BlockParams, ...], n: int) -> Layout:
    tables: Any = plan.tables
    sizes = np.array([sum(x.size for x in tree.flatten(own).values()) for own in params])
    grads = Gradients(params, int(sizes.sum()))
    start = place(grads.memory)
    dmaps, dnorms = zip(*(_distances(own, start) for own in grads.blocks), strict=True)
    totals = np.stack((4 * (np.cumsum(sizes) - sizes), sizes), axis=1)
    rooms = _rooms(plan, n, int(tables.maps[0, layer.QUERY, layer.N_IN]))
    return Layout(_starts(tables, n), rooms, np.array(dmaps), np.array(dnorms), totals)


def _distances(grads: BlockParams, start: int) -> tuple[list[Any], list[Any]]:
    """Of a block's gradients from `start` on, -1 of those that there are not."""

    def distance(x: Array | None) -> int:
        return -1 if x is None else place(x) - start

    attn, ffn = grads.attn, grads.ffn
    kv: Any = attn.kv
    own = attn.q, kv.k, kv.v, attn.o, ffn.up, ffn.gate, ffn.down
    norms = grads.attn_norm, None, grads.ffn_norm, None
    dmaps = [
        (distance(x.w), x.w.flags.c_contiguous, distance(x.b), False)
        if x
        else (-1, False, -1, False)
        for x in own
    ]
    return dmaps, [(distance(x.w), distance(x.b)) if x else (-1, -1) for x in norms]


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
