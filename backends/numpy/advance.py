"""`advance` by one token in few NumPy calls: calling one takes as long as its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer import layers
from xformer.backends.append import append
from xformer.backends.numpy.products import product, worth_threads
from xformer.backends.numpy.threads import run, single_blas_thread
from xformer.base.tree import value
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.layers.advance import advance as reference
from xformer.layers.attention import AttentionParams
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.blocks_cache import order_of
from xformer.layers.feed_forward import FeedForwardParams
from xformer.layers.kv_cache import KVCache
from xformer.layers.linear import LinearParams
from xformer.layers.norm import NormParams
from xformer.layers.protocol import Context, SideInputs
from xformer.layers.rope_by_layer import of_layers
from xformer.layers.stack import StackParams
from xformer.ops.activation import ACTIVATIONS
from xformer.ops.gelu import CUBIC, SCALE


def unsupported(
    x: Array,
    params: StackParams,
    side: SideInputs = SideInputs(),
    *,
    configs: Sequence[BlockConfig],
    context: Context,
    n_cached: int,
    relative_bias: layers.RelativeConfig | None = None,
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    kv_cache = context.kv_cache
    if x.shape[1] != 1 or kv_cache[0].k is None or kv_cache[0].write_index is not None:
        return "not one token that follows a growing KV cache"
    others = (*side, relative_bias, context.mask, context.memory_mask)
    if any(other is not None for other in others):
        return "a memory, a bias, positions in each layer or padding"
    return unsupported_model(params, configs)


def unsupported_model(params: StackParams, configs: Sequence[BlockConfig]) -> str | None:
    """Return why the kernel cannot run for this model, whatever the token is."""
    if any(c.norm_placement == "post" for c in configs):
        return "post-LN"
    if not all(c.norm.eps_inside for c in configs):
        return "eps is outside the root"
    if not (params.memory is params.relative_bias is None):
        return "a shared memory or a relative bias"
    return unsupported_blocks(params.blocks, configs)


def unsupported_blocks(blocks: Sequence[BlockParams], configs: Sequence[BlockConfig]) -> str | None:
    """Return why blocks are not self-attention, then a feed-forward network; None if they are."""
    if any(c.parallel or c.reversible or c.experts or c.attn.softcap for c in configs):
        return "parallel or reversible blocks, experts or softcap"
    for block in blocks:
        if not isinstance(block.attn, AttentionParams):
            return "latent attention or gated DeltaNet"
        attn, kv, ffn, cross = block.attn, block.attn.kv, block.ffn, block.cross
        if kv is None or not isinstance(ffn, FeedForwardParams):
            return "no projections of keys and values, or experts"
        others = (attn.sinks, attn.shaw, attn.xl, attn.gate, attn.q_norm, kv.k_norm, cross)
        if not all(x is None for x in others):
            return "norms of queries and keys, sinks, relative positions, a gate or cross-attention"
        maps = (attn.q, kv.k, kv.v, attn.o, ffn.up, ffn.down, ffn.gate or ffn.up)
        if not all(isinstance(p, LinearParams) for p in maps):
            return "adapters, or a linear layer is left out"
    return None


@kernel(reference, "numpy", unsupported=unsupported)
def advance(
    x: Array,
    params: StackParams,
    side: SideInputs = SideInputs(),
    *,
    configs: Sequence[BlockConfig],
    context: Context,
    n_cached: int,
    relative_bias: layers.RelativeConfig | None = None,
) -> tuple[Array, tuple[KVCache, ...]]:
    """Return the hidden state (B, 1, D) of one token after all layers, and the longer KV caches.

    x: (B, 1, D)
    """
    kv_caches, y, order = [], x[:, 0], order_of(params.blocks, configs)
    tables = of_layers("advance", context.rotary, len(configs))
    # exp overflows in silu if the sigmoid is 0.
    with single_blas_thread(), np.errstate(over="ignore"):
        for i, config in enumerate(configs):
            block = params.blocks[order[i]]
            y, longer = _block(y, block, config, tables[i], context.kv_cache[i])
            kv_caches.append(longer)
        y = _norm(y, params.norm, configs[-1])
    return y[:, None], tuple(kv_caches)


def _block(
    x: Array,
    params: BlockParams,
    config: BlockConfig,
    rotary: layers.RopeTables | None,
    kv_cache: KVCache,
) -> tuple[Array, KVCache]:
    """Return the output (B, D) of one block for x (B, D), and its longer KV cache."""
    attn: Any = params.attn  # AttentionParams
    normed = _norm(x, params.attn_norm, config)
    branch, kv_cache = _attend(normed, attn, config, rotary, kv_cache)
    x = x + _scaled(_norm(branch, params.attn_out_norm, config), params.attn_scale, config)
    branch = _feed(_norm(x, params.ffn_norm, config), params.ffn, config)
    x += _scaled(_norm(branch, params.ffn_out_norm, config), params.ffn_scale, config)
    return x, kv_cache


def _attend(
    x: Array,
    params: AttentionParams,
    config: BlockConfig,
    rotary: layers.RopeTables | None,
    kv_cache: KVCache,
) -> tuple[Array, KVCache]:
    """Return the self-attention output (B, D) for x (B, D), and the longer KV cache."""
    attn: Any = config.attn  # AttentionConfig
    n, n_heads, n_groups = len(x), attn.n_heads, attn.kv_heads
    projections: Any = params.kv
    q, k = _linear(x, params.q), _linear(x, projections.k)
    v = _linear(x, projections.v).reshape(n, n_groups, 1, -1)
    if rotary is None:
        q, k = q.reshape(n, n_heads, 1, -1), k.reshape(n, n_groups, 1, -1)
    else:
        qk = np.concatenate((q, k), axis=-1).reshape(n, n_heads + n_groups, 1, -1)
        qk = _rotated(qk, rotary)
        q, k = qk[:, :n_heads], qk[:, n_heads:]
    if attn.window is not None and attn.window[0] is not None:
        kv_cache = kv_cache.last(attn.window[0])
    kv_cache = append(k, v, kv_cache=kv_cache)
    keys: Any = kv_cache.k
    q = q.reshape(n, n_groups, n_heads // n_groups, -1)
    q *= k.shape[-1] ** -0.5 if attn.scale is None else attn.scale
    scores = q @ keys.mT  # (B, G, H / G, S)
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    probs = np.exp(scores, out=scores)
    probs /= np.add.reduce(probs, axis=-1, keepdims=True)
    return _linear((probs @ kv_cache.v).reshape(n, -1), params.o), kv_cache


def _rotated(x: Array, rotary: layers.RopeTables) -> Array:
    """Return x (B, H, 1, K) after RoPE, as `ops.rope` computes it."""
    cos, sin, interleaved = rotary
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b, y = x[..., first], x[..., second], x.copy()
    y[..., first] = a * cos - b * sin
    y[..., second] = b * cos + a * sin
    return y


def _feed(x: Array, params: Any, config: BlockConfig) -> Array:
    """Return the output (B, D) of the feed-forward network for x (B, D)."""
    hidden = _linear(x, params.up)
    if params.gate is None:
        return _linear(_activated(hidden, config.ffn.activation), params.down)
    gated = _activated(_linear(x, params.gate), config.ffn.activation)
    gated *= hidden
    return _linear(gated, params.down)


def _activated(x: Array, name: str) -> Array:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        return x / (1 + np.exp(-2 * SCALE * x * (1 + CUBIC * (x * x))))
    return ACTIVATIONS[name](x)[0]


def _norm(x: Array, params: NormParams | None, config: BlockConfig) -> Array:
    if params is None:
        return x
    w, b, width = value(params.w), value(params.b), x.shape[-1]
    if config.norm.kind == "rms":
        y = x * (w + config.norm.offset if config.norm.offset else w)
        y /= np.sqrt(np.vecdot(x, x) / width + config.norm.eps)[:, None]
        return y
    wider = np.longdouble if x.dtype == np.float64 else np.float64  # exact for equal numbers
    mean = (np.add.reduce(x, axis=-1, dtype=wider) / width)[:, None]
    y = np.subtract(x, mean, dtype=x.dtype, casting="same_kind")
    y *= w / np.sqrt(np.vecdot(y, y) / width + config.norm.eps)[:, None]
    if b is not None:
        y += b
    return y


def _scaled(x: Array, scale: Array | None, config: BlockConfig) -> Array:
    x = x if scale is None else x * value(scale)
    return x if config.residual_multiplier == 1.0 else x * config.residual_multiplier


def _linear(x: Array, params: Any) -> Array:
    """Return x w + b, on several threads if that pays."""
    w, b = value(params.w), value(params.b)
    if worth_threads(len(x), w.size):
        y = np.empty((len(x), w.shape[1]), x.dtype)
        run(product(x, w, y, b))
        return y
    y = x @ w
    if b is not None:
        y += b
    return y
