"""A sequence of blocks. Layers may share the parameters of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xformer import tree
from xformer.dispatch import overridable
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig, BlockParams, block_terms
from xformer.layers.kv_cache import KVCache
from xformer.layers.protocol import Context, SideInputs
from xformer.layers.residual import summed
from xformer.layers.rope_by_layer import of_layers
from xformer.ready import Ready, report
from xformer.showing import short
from xformer.typing import Array

if TYPE_CHECKING:
    from xformer.layers.reversible import ReversibleCache


@overridable(drops=False, composite=True)
def blocks(
    x: Array,
    params: tuple[BlockParams, ...],
    side: SideInputs = SideInputs(),
    *,
    configs: Sequence[BlockConfig],
    context: Context = Context(),
    activation_checkpointing: bool = False,
) -> tuple[Array, BlocksCache | ReversibleCache]:
    """y = block_n(... block_1(x)). Every block gets side and context.

    If configs are reversible, the blocks run on two streams, which begin as x, and y is the mean of
    both (`xformer/layers/reversible.py`).

    x, y: (B, T, D), or one sequence (T, D)
    params: of each block; with fewer blocks than layers, equal runs of layers share a block
    side.memory: (B, S, D), (S, D) or a KeyValue for all layers, or a KeyValue for each layer, whose
        gradient is a tuple; None without cross-attention, and for reversible blocks
    configs: of each layer
    context.rotary: RoPE tables of all layers, or a sequence of tables or None for each layer
    context.kv_cache: of each layer; then nothing is saved for backward
    context.segment_memory: of each layer (`layers.attention`); not for reversible blocks. The
        cache's `extended` has it, followed by the inputs of the layer's attention.
    activation_checkpointing: each block saves only its arguments, and runs again in backward; not
        for reversible blocks, which save less
    ValueError for shapes and numbers that do not fit.
    """
    order, n = order_of(params, configs), len(configs)
    context = context._replace(rotary=of_layers("blocks", context.rotary, n))
    if len({config.reversible for config in configs}) > 1:
        raise ValueError("blocks: either all blocks must be reversible, or none")
    if configs[0].reversible:
        from xformer.layers.reversible import reversible

        if activation_checkpointing:
            raise ValueError("blocks: reversible excludes activation_checkpointing")
        return reversible(x, params, side, configs=configs, context=context)
    own_memory = isinstance(side.memory, Sequence) and not isinstance(side.memory, KeyValue)
    if own_memory and len(side.memory) != n:
        raise ValueError(
            f"blocks: memory must be one for all layers, or a KeyValue for each of {n}, "
            f"got {len(side.memory)}"
        )
    decodes, has_segments = context.kv_cache is not None, context.segment_memory is not None
    if has_segments and len(context.segment_memory) != n:
        raise ValueError(
            f"blocks: segment_memory must have an array for each of {n} layers, "
            f"got {len(context.segment_memory)}"
        )
    caches: list[Any] = []
    extended: list[Any] = []
    run: Any = block_terms
    if activation_checkpointing and not decodes:
        from xformer.layers.checkpoint import checkpointed as run
    r = None  # a term that the next norm or the last line adds to x
    for i, config in enumerate(configs):
        inputs = side._replace(memory=side.memory[i]) if own_memory else side
        how = context.of_layer(i)
        (x, r), cache = run(x, params[order[i]], inputs, r, config=config, context=how)
        caches.append(cache.kv_cache if decodes else cache)
        if has_segments:
            extended.append(cache.extended)
    y = summed(x, r)
    if decodes:
        return y, BlocksCache((), order, own_memory, tuple(caches))
    return y, BlocksCache(tuple(caches), order, own_memory, (), tuple(extended))


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
            dparams[which] = dblock if dparams[which] is None else add(dparams[which], dblock)
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


def add(a: Any, b: Any) -> Any:
    """The sum of two trees, leaf by leaf."""
    return tree.map(lambda x, y: x + y, a, b)
