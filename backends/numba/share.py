"""`blocks` of a thread's share of a batch in training: a layer in one call, and one backward.

Between the calls of a layer's ops the threads would wait for each other's Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba import layer, share_layer
from xformer.backends.numba.atomic import place
from xformer.backends.numba.blocks import read, tile_of_layer, turns_of
from xformer.backends.numba.compiled import PLAIN
from xformer.backends.numba.gemm import products
from xformer.backends.numba.maps import places
from xformer.backends.numba.plan import Plan, remembered
from xformer.backends.numba.sdpa import pad_of
from xformer.backends.numpy.threads import in_piece, scratch

from xformer import ops
from xformer.checks import require_gradient
from xformer.dispatch import keeps_nothing
from xformer.layers.attention import AttentionParams, KeyValue, KeyValueParams
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.blocks import BlocksCache, order_of
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
    if keeps_nothing() or not in_piece():
        return "only a thread's share of a batch, for a backward"
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
    return "what is frozen has no gradient" if plan.frozen else None


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
) -> tuple[Array, BlocksCache]:
    """Layer by layer."""
    plan, order = remembered(params, configs), order_of(params, configs)
    if plan.tables is None:
        raise ValueError(f"blocks: {plan.refusal}")
    turns, interleaved = turns_of(rotary, x.dtype)
    n_texts, length, _ = x.shape
    pad = np.array(pad_of(mask, n_texts, length, x.dtype), order="C")
    caches: list[LayerCache] = []
    for i, config in enumerate(configs):
        tile = np.array(tile_of_layer(config, causal, length), np.int64)
        options = tile, turns, interleaved, pad
        x, cache = _layer(x, params[order[i]], config, _of_layer(plan, i), options)
        caches.append(cache)
    return x, BlocksCache(tuple(caches), order, False, ())


def _of_layer(plan: Plan, i: int) -> tuple[Any, ...]:
    """The tables of one layer."""
    tables: Any = plan.tables
    maps, norms, sizes, numbers, scales = tables
    own = slice(layer.NORMS * i, layer.NORMS * (i + 1))
    return maps[i], norms[own], sizes[i], numbers[own], scales[i]


def _layer(
    x: Array, params: BlockParams, config: BlockConfig, tables: Any, options: Any
) -> tuple[Array, LayerCache]:
    maps, size = tables[0], tables[2]
    n_texts, length, d_model = x.shape
    n, (wide, gate) = n_texts * length, maps[[layer.UP, layer.GATE], layer.N_OUT]
    y, middle = np.empty(x.shape, x.dtype), np.empty((n, d_model), x.dtype)
    cache = LayerCache(
        params,
        config,
        options,
        np.require(x, None, PLAIN).reshape(n, d_model),
        np.empty(n * maps[: layer.OUT, layer.N_OUT].sum(), x.dtype),
        np.empty((n, maps[layer.OUT, layer.N_IN]), x.dtype),
        np.empty((2, n_texts, size[layer.HEADS], length), x.dtype),
        middle,
        np.empty((n, wide), x.dtype),
        np.empty((n if gate else 0, wide), x.dtype),
        np.empty((n, wide), x.dtype),
    )
    h = scratch("h", middle.shape, x.dtype)
    share_layer.forward(products(), tables, options, *cache[3:], y.reshape(middle.shape), h)
    return y, cache


class LayerCache(NamedTuple):
    """What a layer keeps for its backward: arrays as in `share_layer.forward`, N = B T."""

    params: BlockParams
    config: BlockConfig
    options: tuple[Array, Array, bool, Array]  # of attention: tile, turns, interleaved, pad
    x: Array  # (N, D)
    mapped: Array  # (N (H K + G K + G M),)
    ctx: Array  # (N, H M)
    statistics: Array  # (2, B, H, T)
    middle: Array  # (N, D)
    ups: Array  # (N, F)
    opened: Array  # (N, F) or (0, F)
    hidden: Array  # (N, F)

    def backward(self, dy: Array) -> tuple[Any, ...]:
        """As `BlockCache.backward`: of x, params, and None in the place of the rest."""
        shape = *self.statistics.shape[1::2], self.x.shape[1]
        require_gradient("blocks", "dy", dy, self.x, shape)
        tile, turns, interleaved, pad = self.options
        back = turns * np.array([1, -1], turns.dtype)[:, None, None, None]
        # Anew, since a cache may have been copied: addresses are of these parameters.
        tables = _of_layer(remembered((self.params,), (self.config,)), 0)
        grads, dx = _empty_like(self.params), np.empty(shape, dy.dtype)
        share_layer.backward(
            products(),
            tables,
            (tile, back, interleaved, pad),
            *self[3:],
            np.require(dy, None, PLAIN).reshape(self.x.shape),
            *_places(grads),
            dx.reshape(self.x.shape),
            *self._memory(),
        )
        return dx, grads, None, None, None, None

    def _memory(self) -> list[Array]:
        """As `share_layer.backward` needs it, some of it twice."""
        width, kind = self.x.shape, self.x.dtype
        dmiddle, h, dh = (scratch(name, width, kind) for name in ("dmiddle", "h", "dh"))
        dhidden, dctx = _either("dhidden", self.hidden, self.ctx)
        dups, dmapped = _either("dups", self.ups, self.mapped)
        dopened = scratch("dopened", self.opened.shape, kind)
        return [dmiddle, h, dh, dhidden, dups, dopened, dctx, dmapped]


def _either(name: str, one: Array, other: Array) -> tuple[Array, Array]:
    """Memory for what is like one, and then for what is like the other."""
    both = scratch(name, (max(one.size, other.size),), one.dtype)
    return both[: one.size].reshape(one.shape), both[: other.size].reshape(other.shape)


def _empty_like(params: BlockParams) -> BlockParams:
    """Memory for their gradients."""
    attn, ffn = params.attn, params.ffn
    kv: Any = attn.kv
    q, k, v, o, up, down, gate = map(
        _pair_like, (attn.q, kv.k, kv.v, attn.o, ffn.up, ffn.down, ffn.gate)
    )
    attn_norm, ffn_norm = _pair_like(params.attn_norm), _pair_like(params.ffn_norm)
    own = AttentionParams(q, KeyValueParams(k, v), o)
    return BlockParams(attn_norm, own, None, None, ffn_norm, FeedForwardParams(up, down, gate))


def _pair_like(own: Any) -> Any:
    """LinearParams or NormParams as they lie in memory: a tied map's lies sideways."""
    return own and own._make(None if x is None else np.empty_like(x) for x in own)


def _places(grads: BlockParams) -> tuple[Array, Array]:
    """Of the gradients, as `share_layer.backward` reads them."""
    attn, ffn = grads.attn, grads.ffn
    kv: Any = attn.kv
    maps = attn.q, kv.k, kv.v, attn.o, ffn.up, ffn.gate, ffn.down
    dmaps = [places(own.w, own.b) if own else (0, 0, 0, 0) for own in maps]
    norms = grads.attn_norm, None, grads.ffn_norm, None
    dnorms = [(place(own.w), place(own.b)) if own else (0, 0) for own in norms]
    return np.array(dmaps, np.int64), np.array(dnorms, np.int64)
