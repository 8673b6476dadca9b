"""Decoding: a stack of blocks on new tokens, with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from xformer import layers
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.layers.block import BlockConfig
from xformer.layers.kv_cache import KVCache
from xformer.layers.protocol import Context, SideInputs
from xformer.layers.stack import StackParams, stack


@overridable(backward=False)
def advance(
    x: Array,
    params: StackParams,
    side: SideInputs = SideInputs(),
    *,
    configs: Sequence[BlockConfig],
    context: Context,
    n_cached: int | Array,
    relative_bias: layers.RelativeConfig | None = None,
) -> tuple[Array, tuple[KVCache, ...]]:
    """The output y (B, T, D) of a causal `layers.stack` on new tokens, and the new KV caches.

    Nothing is saved for backward.

    S is the number of keys: all tokens before x, also those that windows have dropped, and the new
    tokens. If the KV cache is static, S is the number of slots.

    x: (B, T, D), the new tokens
    params: of the stack (`StackParams.init`)
    side.memory: keys and values of the encoder's output for each layer (`memory_of`), or None
    side.bias: broadcasts to (B, H, T, S), added to the scores of the self-attention
    side.pos: (T, K), added to queries, keys and values of the new tokens
    configs: one for each layer
    context: of `layers.blocks`, with the KV caches of the tokens before x
    n_cached: the number of tokens before x, including those that windows have dropped; for a static
        KV cache an integer array () (`KVCache.write_index`). It is used only with relative_bias.
    relative_bias: the configuration of params.relative_bias, which is added to bias
    ValueError for shapes and numbers that do not fit.
    """
    y, cache = stack(
        x,
        params,
        side,
        configs=configs,
        context=context._replace(causal=True),
        relative_bias=relative_bias,
        n_cached=n_cached,
    )
    return y, cache.layers.kv_cache
