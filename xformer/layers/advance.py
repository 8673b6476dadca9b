"""A stack of blocks on new tokens: their outputs, and the KV cache with them."""

from __future__ import annotations

from collections.abc import Sequence

from xformer import layers
from xformer.dispatch import overridable
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig
from xformer.layers.kv_cache import KVCache
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
    relative: layers.RelativeConfig | None = None,
    rotary: layers.RopeTables | None = None,
    mask: Array | None = None,
    memory_mask: Array | None = None,
) -> tuple[Array, tuple[KVCache, ...]]:
    """`layers.stack`, causal, for a text that grows; nothing is kept for a backward.

    x, y: (B, T, D), of the new tokens. kv_cache: of each layer; n_cached, the tokens so far, of
    which windows may have dropped some, an integer array () in fixed columns
    (`KVCache.write_index`). memory: as `memory_of` makes it, once for all steps.
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
        relative=relative,
        rotary=rotary,
        mask=mask,
        causal=True,
        memory_mask=memory_mask,
    )
    return y, cache.layers.kv_cache
