"""A sequence of blocks. Layers may share the parameters of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig, BlockParams, block_terms
from xformer.layers.blocks_cache import BlocksCache, order_of
from xformer.layers.protocol import Context, SideInputs
from xformer.layers.residual import summed
from xformer.layers.rope_by_layer import of_layers

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
