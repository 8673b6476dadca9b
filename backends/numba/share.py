"""`blocks` of a batch in training: each thread's share in one call forward, and in one back.

Between the calls of ops, or of layers, the threads would wait for each other's Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
from xformer.backends.numba import layer, share_loops
from xformer.backends.numba.atomic import needed, nothing_done, place
from xformer.backends.numba.blocks import read, tile_of_layer, turns_of
from xformer.backends.numba.compiled import PLAIN
from xformer.backends.numba.gemm import products
from xformer.backends.numba.maps import places
from xformer.backends.numba.plan import Plan, Tables, remembered
from xformer.backends.numba.sdpa import pad_of
from xformer.backends.numpy.blocks import require_no_routers, unshared, without_layers
from xformer.backends.numpy.threads import LINE, lined, n_threads, run, scratch

from xformer import ops, tree
from xformer.checks import require_gradient
from xformer.dispatch import keeps_nothing
from xformer.layers.attention import AttentionParams, KeyValue, KeyValueParams
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.blocks import order_of
from xformer.layers.feed_forward import FeedForwardParams
from xformer.layers.past import Past
from xformer.layers.rotary import Rotary
from xformer.typing import Array


def outside(
    x: Array,
    params: tuple[BlockParams, ...],
    memory: Array | KeyValue | Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    rotary: Rotary | None = None,
    past: Sequence[Past] | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.Key | None = None,
    checkpoint: bool = False,
) -> str | None:
    """Why the kernel cannot run."""
    if keeps_nothing():
        return "only for a backward"
    if checkpoint:
        return "no checkpoints"
    if not (memory is bias is pos is memory_pos is past is memory_mask is None):
        return "a memory, a bias, positions in each layer or a text that grows"
    if dropout_key is not None and any(
        c.dropout or c.probs_dropout or c.hidden_dropout for c in configs
    ):
        return "no dropout"
    if any(c.norm == "post" for c in configs) or any(
        p.attn_out_norm or p.ffn_out_norm for p in params
    ):
        return "only norms before the branches"
    plan = read(x, params, configs, rotary, mask)
    if isinstance(plan, str):
        return plan
    if plan.frozen:
        return "what is frozen has no gradient"
    return unshared(x, params, configs=configs, rotary=rotary, mask=mask)


def blocks(
    x: Array,
    params: tuple[BlockParams, ...],
    memory: Array | KeyValue | Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    rotary: Rotary | None = None,
    past: Sequence[Past] | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.Key | None = None,
    checkpoint: bool = False,
) -> tuple[Array, SharesCache]:
    """Shares of x; of each a row of what is kept."""
    plan, (n_texts, length, _) = remembered(params, configs), x.shape
    if plan.tables is None:
        raise ValueError(f"blocks: {plan.refusal}")
    tiles = np.array([tile_of_layer(config, causal, length) for config in configs], np.int64)
    pad = np.array(pad_of(mask, n_texts, length, x.dtype), order="C")
    options = tiles, *turns_of(rotary, x.dtype), pad
    size = -(-n_texts // n_threads())
    starts = _starts(plan.tables, size * length)
    x, y = np.require(x, None, PLAIN), np.empty(x.shape, x.dtype)
    kept = lined((-(-n_texts // size), int(starts[-1, -1])), x.dtype)

    def forward(share: int) -> None:
        h = scratch("h", (size * length, x.shape[2]), x.dtype)
        own = kept[share], starts, y, h
        share_loops.forward(products(), share, size, plan.tables, options, x, *own)

    run([partial(forward, share) for share in range(len(kept))])
    return y, SharesCache(params, tuple(configs), options, size, x, kept)


class SharesCache(NamedTuple):
    """What `blocks` keeps for its backward."""

    params: tuple[BlockParams, ...]
    configs: tuple[BlockConfig, ...]
    options: tuple[Array, Array, bool, Array]  # of attention: tiles, turns, interleaved, pad
    size: int  # how many texts a share has, at most
    x: Array  # (B, T, D)
    kept: Array  # of each share a row, as in `share_loops`

    @property
    def blocks(self) -> NoReturn:
        """AttributeError, where `BlocksCache` has the cache of each layer."""
        without_layers()

    def backward(self, dy: Array, drouter_logits: Sequence[None] | None = None) -> tuple[Any, ...]:
        """As that of NumPy's `SharesCache`; shares add to one another's gradients in turn."""
        require_gradient("blocks", "dy", dy, self.x)
        require_no_routers(drouter_logits)
        # Anew, since a cache may have been copied: addresses are of these parameters.
        plan = remembered(self.params, self.configs)
        if plan.tables is None:
            raise ValueError(f"blocks: {plan.refusal}")
        tiles, turns, interleaved, pad = self.options
        back = turns * np.array([1, -1], turns.dtype)[:, None, None, None]
        dx, dy = np.empty(self.x.shape, dy.dtype), np.require(dy, None, PLAIN)
        room = _Room(self.params, dy.dtype)
        rooms = _rooms(plan, self.size * self.x.shape[1], self.x.shape[2])
        stages = nothing_done(len(self.params) + 1)
        given = (
            self.size,
            plan.tables,
            (tiles, back, interleaved, pad),
            np.array(order_of(self.params, self.configs), np.int64),
            self.x,
            self.kept,
            _starts(plan.tables, self.size * self.x.shape[1]),
            dy,
            *room.places(),
            dx,
        )

        def backward() -> None:
            with needed(stages):
                mine = scratch("dblock", (max(room.sizes),), dy.dtype)
                memory = scratch("slopes", (rooms[-1],), dy.dtype)
                share_loops.backward(products(), *given, mine, memory, rooms[:-1], stages)

        run([backward] * len(self.kept))
        return dx, room.grads, None, None, None, None


class _Room:
    """Memory for the gradients of blocks, one behind the other; whoever keeps one keeps it all."""

    def __init__(self, params: tuple[BlockParams, ...], dtype: Any) -> None:
        self.sizes = [sum(x.size for x in tree.flatten(own).values()) for own in params]
        self._memory, self._taken = lined((sum(self.sizes),), dtype), 0
        self.grads = tuple(self._like(own) for own in params)

    def places(self) -> tuple[Array, Array, Array]:
        """As `share_loops.backward` reads them."""
        dmaps, dnorms = zip(*map(_places, self.grads), strict=True)
        sizes = np.array(self.sizes)
        starts = place(self._memory) + self._memory.itemsize * (np.cumsum(sizes) - sizes)
        return np.array(dmaps), np.array(dnorms), np.stack((starts, sizes), axis=1)

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
        flat = self._memory[start : self._taken]
        sideways = x.ndim == 2 and x.strides[0] < x.strides[1]
        return flat.reshape(x.shape[::-1]).T if sideways else flat.reshape(x.shape)


def _places(grads: BlockParams) -> tuple[list[Any], list[Any]]:
    """Of a block's gradients, as `share_layer.backward` reads them."""
    attn, ffn = grads.attn, grads.ffn
    kv: Any = attn.kv
    own = attn.q, kv.k, kv.v, attn.o, ffn.up, ffn.gate, ffn.down
    dmaps = [places(x.w, x.b) if x else (0, 0, 0, 0) for x in own]
    norms = grads.attn_norm, None, grads.ffn_norm, None
    return dmaps, [(place(x.w), place(x.b)) if x else (0, 0) for x in norms]


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
