"""Blocks one after the other, each with parameters of its own or with those of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer import layers, ops, tree
from xformer.dispatch import overridable
from xformer.layers.attention import KeyValue
from xformer.layers.block import SITES, BlockConfig, BlockParams, block_terms
from xformer.layers.kv_cache import KVCache
from xformer.layers.residual import summed
from xformer.showing import short
from xformer.typing import Array


@overridable(drops=False)
def blocks(
    x: Array,
    params: tuple[BlockParams, ...],
    memory: Array | KeyValue | Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    rotary: layers.RopeTables | None = None,
    kv_cache: Sequence[KVCache] | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.RandomKey | None = None,
    activation_checkpointing: bool = False,
) -> tuple[Array, BlocksCache]:
    """y = block_n(... block_1(x)); every block sees bias, positions and masks.

    x, y: (B, T, D). configs: one for each layer. Where there are fewer blocks than layers, equal
    runs of layers share one, in order. memory: one for all layers, or a sequence of a KeyValue for
    each, whose gradient is a tuple. kv_cache: of each layer; then nothing is saved for a backward.
    The rest as in `layers.block` and `layers.stack`. ValueError where the numbers do not fit.
    """
    order = order_of(params, configs)
    own_memory = isinstance(memory, Sequence) and not isinstance(memory, KeyValue)
    memories: Any = memory if own_memory else (memory,) * len(configs)
    if len(memories) != len(configs):
        raise ValueError(
            f"blocks: memory must be one for all layers, or a KeyValue for each of {len(configs)}, "
            f"got {len(memories)}"
        )
    caches: list[Any] = []
    run: Any = block_terms
    if activation_checkpointing and kv_cache is None:
        from xformer.layers.checkpoint import checkpointed as run
    r = None  # what is still to be added to x
    for i, config in enumerate(configs):
        (x, r), cache = run(
            x,
            params[order[i]],
            memories[i],
            bias,
            pos,
            memory_pos,
            r=r,
            config=config,
            rotary=rotary,
            kv_cache=None if kv_cache is None else kv_cache[i],
            mask=mask,
            causal=causal,
            memory_mask=memory_mask,
            dropout_key=None if dropout_key is None else dropout_key.at(SITES * i),
        )
        caches.append(cache if kv_cache is None else cache.kv_cache)
    y = summed(x, r)
    if kv_cache is None:
        return y, BlocksCache(tuple(caches), order, own_memory, ())
    return y, BlocksCache((), order, own_memory, tuple(caches))


@short
class BlocksCache(NamedTuple):
    """What `blocks` keeps for its backward."""

    blocks: tuple[Any, ...]
    order: tuple[int, ...]  # of each layer, the block whose parameters it has
    own_memory: bool  # whether each layer has its own
    kv_cache: tuple[KVCache, ...]  # of each layer, if it was given: then there is no backward

    def backward(self, dy: Array, drouter_logits: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos, in that order.

        drouter_logits: for each layer the gradient of an auxiliary loss on its router, or None.
        """
        if self.kv_cache:
            raise ValueError("blocks: with a KV cache nothing is saved for a backward")
        dx = dy
        dparams: list[Any] = [None] * (max(self.order) + 1)
        shared: Any = None
        dmemories: list[Any] = []  # from the last layer to the first, where each has its own
        for i in reversed(range(len(self.blocks))):
            dlogits = None if drouter_logits is None else drouter_logits[i]
            extra = () if dlogits is None else (dlogits,)
            dx, dblock, *dshared = self.blocks[i].backward(dx, *extra)
            if self.own_memory:
                dmemories.append(dshared[0])
                dshared[0] = None
            which = self.order[i]
            dparams[which] = dblock if dparams[which] is None else add(dparams[which], dblock)
            shared = dshared if shared is None else add(shared, dshared)
        if self.own_memory:
            shared[0] = tuple(reversed(dmemories))
        return dx, tuple(dparams), *shared


def order_of(params: tuple[BlockParams, ...], configs: Sequence[BlockConfig]) -> tuple[int, ...]:
    """Of each layer, the block whose parameters it has. ValueError where the numbers do not fit."""
    n_blocks, n_layers = len(params), len(configs)
    if n_blocks == 0 or n_layers % n_blocks:
        raise ValueError(
            f"blocks: params must hold a block for each of {n_layers} layers, or for equal runs of "
            f"them, got {n_blocks}"
        )
    return tuple(i // (n_layers // n_blocks) for i in range(n_layers))


def add(a: Any, b: Any) -> Any:
    """The sum of two trees."""
    return tree.map(lambda x, y: x + y, a, b)
