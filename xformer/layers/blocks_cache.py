"""The cache of a sequence of blocks: which block each layer has, and sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.grad_callback import Ready, report
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.kv_cache import KVCache
from xformer.layers.protocol import SideInputs, plus


@short
class BlocksCache(NamedTuple):
    """Saved by `blocks` for backward: the cache of each layer, and which layers share a block."""

    blocks: tuple[Any, ...]  # the cache of each layer
    order: tuple[int, ...]  # the index of each layer's block
    own_memory: bool  # whether there was a memory for each layer
    kv_cache: tuple[KVCache, ...]  # of each layer, if one was given; then there is no backward
    extended: tuple[Array, ...] = ()  # of each layer, if there was a segment memory

    def backward(
        self,
        dy: Array,
        drouter_logits: Sequence[Any] | None = None,
        *,
        ready: Ready | None = None,
    ) -> tuple[Array, tuple[BlockParams, ...], SideInputs]:
        """Gradients of x, params and side.

        drouter_logits: for each layer, the gradient of an auxiliary loss on its router, or None.
        ready: called with "blocks.i" and the gradients of this block, after its first layer
        ValueError if `blocks` had a KV cache.
        """
        if self.kv_cache:
            raise ValueError("blocks: with a KV cache nothing is saved for a backward")
        dx = dy
        dparams: list[Any] = [None] * (max(self.order) + 1)
        dside = SideInputs()
        dmemories: list[Any] = []  # of each layer, from the last to the first
        for i in reversed(range(len(self.blocks))):
            dlogits = None if drouter_logits is None else drouter_logits[i]
            extra = () if dlogits is None else (dlogits,)
            dx, dblock, of_layer = self.blocks[i].backward(dx, *extra)
            if self.own_memory:
                dmemories.append(of_layer.memory)
                of_layer = of_layer._replace(memory=None)
            which = self.order[i]
            dparams[which] = plus(dparams[which], dblock)
            report_block(ready, self.order, i, dparams)
            dside = dside.plus(of_layer)
        if self.own_memory:
            dside = dside._replace(memory=tuple(reversed(dmemories)))
        return dx, tuple(dparams), dside


def report_block(ready: Ready | None, order: Sequence[int], i: int, dparams: Sequence[Any]) -> None:
    """Report the gradients of layer i's block, if no layer below has the same block."""
    which = order[i]
    if which not in order[:i]:
        report(ready, f"blocks.{which}", dparams[which])


def order_of(params: tuple[BlockParams, ...], configs: Sequence[BlockConfig]) -> tuple[int, ...]:
    """The index of each layer's block. ValueError unless the blocks divide the layers."""
    n_blocks, n_layers = len(params), len(configs)
    if n_blocks == 0 or n_layers % n_blocks:
        raise ValueError(
            f"blocks: params must hold a block for each of {n_layers} layers, or for equal runs of "
            f"them, got {n_blocks}"
        )
    return tuple(i // (n_layers // n_blocks) for i in range(n_layers))
