"""Activation checkpointing: a block saves only its arguments, and runs again in backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import again, current_contexts, is_inference
from xformer.layers.block import BlockConfig, BlockParams, block, block_terms
from xformer.layers.protocol import Context, SideInputs
from xformer.layers.residual import Terms, summed
from xformer.ops.barrier import barrier


def checkpointed(
    x: Array,
    params: BlockParams,
    side: SideInputs,
    r: Array | None = None,
    *,
    config: BlockConfig,
    context: Context,
) -> tuple[Terms, Any]:
    """`block_terms` with activation checkpointing (arXiv:1604.06174).

    For the arguments and results see `block_terms`. Only the arguments are saved. The backward runs
    the forward again: the same operations on the same arrays, with the same dropout bits. So the
    gradients are the same, bit for bit if the library's arithmetic is repeatable. It costs about a
    third of the time of a step.
    """
    if is_inference():  # nothing is saved, which is less than the arguments
        return block_terms(x, params, side, r, config=config, context=context)
    x = summed(x, r)
    y, cache = block(x, params, side, config=config, context=context)  # one array to save
    router = None
    if config.experts is not None:
        router = RouterCache(cache.router.router_logits, cache.router.ids)
    extended = None if context.segment_memory is None else cache.extended
    about = config, context, router, extended
    return (y, None), CheckpointCache(x, params, side, *about, current_contexts())


@short
class RouterCache(NamedTuple):
    """The results of a router that auxiliary losses need before backward."""

    router_logits: Array  # (N, E)
    ids: Array  # (N, C)


@short
class CheckpointCache(NamedTuple):
    """Saved by `checkpointed` for backward: the arguments of the block.

    Only x is an extra array: the others are parameters, or shared by all blocks. With a segment
    memory, the next memory needs one more.
    """

    x: Array
    params: BlockParams
    side: SideInputs
    config: BlockConfig
    context: Context
    router: RouterCache | None
    extended: Array | None  # of `attention`, for the next segment memory
    contexts: tuple[Any, ...]  # of the forward

    def backward(self, dy: Array, *drouter_logits: Array) -> tuple[Array, BlockParams, SideInputs]:
        """Gradients of x, params and side.

        drouter_logits: the gradient of an auxiliary loss on the router, if any.
        """
        grads: tuple[Array, BlockParams, SideInputs]
        grads = self.again(dy).backward(dy, *drouter_logits)
        return grads

    def again(self, dy: Array) -> Any:
        """The cache of the block, from a second forward."""
        key = self.context.dropout_key
        x, memory, key = barrier(self.x, memory=self.side.memory, key=key, dy=dy)
        side, context = self.side._replace(memory=memory), self.context._replace(dropout_key=key)
        with again(self.contexts):
            return block(x, self.params, side, config=self.config, context=context)[1]
