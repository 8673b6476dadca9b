"""Decoding: a stack of blocks on new tokens, with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from xformer import layers
from xformer.dispatch import overridable
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig
from xformer.layers.kv_cache import KVCache
from xformer.layers.rope_by_layer import LayerTables
from xformer.layers.stack import StackParams, stack
from xformer.typing import Array


@overridable(backward=False)
def advance(
    x: Array,
    params: StackParams,
    memory: Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    kv_cache: Sequence[KVCache],
    n_cached: int | Array,
    relative_bias: layers.RelativeConfig | None = None,
    rotary: LayerTables = None,
    mask: Array | None = None,
    memory_mask: Array | None = None,
) -> tuple[Array, tuple[KVCache, ...]]:
    """The output y (B, T, D) of a causal `layers.stack` on new tokens, and the new KV caches.

    Nothing is saved for backward.

    S is the number of keys: all tokens before x, also those that windows have dropped, and the new
    tokens. If the KV cache is static, S is the number of slots.

    x: (B, T, D), the new tokens
    params: of the stack (`StackParams.init`)
    memory: keys and values of the encoder's output for each layer (`memory_of`), or None
    bias: broadcasts to (B, H, T, S), added to the scores of the self-attention
    pos: (T, K), added to queries, keys and values of the new tokens
    configs: one for each layer
    kv_cache: one for each layer, with the keys and values of the tokens before x
    n_cached: the number of tokens before x, including those that windows have dropped; for a static
        KV cache an integer array () (`KVCache.write_index`). It is used only with relative_bias.
    relative_bias: the configuration of params.relative_bias, which is added to bias
    rotary: RoPE tables of the new tokens, for all layers; or a sequence of tables or None for each
        layer
    mask: boolean, broadcasts to (B, H, T, S), for the self-attention; True = may attend
    memory_mask: the mask of the cross-attention
    ValueError for shapes and numbers that do not fit.
    """
    y, cache = stack(
        x,
        params,
        memory,
        bias,
        pos,
        configs=configs,
        kv_cache=kv_cache,
        n_cached=n_cached,
        relative_bias=relative_bias,
        rotary=rotary,
        mask=mask,
        causal=True,
        memory_mask=memory_mask,
    )
    return y, cache.layers.kv_cache
