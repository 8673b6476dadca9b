"""Decoding: a stack of blocks on new tokens, with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from xformer import layers, renamed
from xformer.dispatch import overridable
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig
from xformer.layers.kv_cache import KVCache
from xformer.layers.stack import StackParams, stack
from xformer.typing import Array


@overridable(backward=False)
@renamed.arguments(relative="relative_bias")
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
    rotary: layers.RopeTables | None = None,
    mask: Array | None = None,
    memory_mask: Array | None = None,
) -> tuple[Array, tuple[KVCache, ...]]:
    """The output y (B, T, D) of a causal `layers.stack` on new tokens, and the new KV caches.

    Nothing is saved for backward.

    x: (B, T, D), the new tokens
    memory: keys and values of the encoder's output for each layer (`memory_of`), or None
    bias, pos, mask, memory_mask: of `layers.block`
    configs: of each layer
    kv_cache: of each layer, with the tokens before
    n_cached: the number of tokens before, including those that windows have dropped; for a static
        KV cache an integer array () (`KVCache.write_index`)
    relative_bias, rotary: of `layers.stack`
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
