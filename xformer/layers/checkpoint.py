"""Activation checkpointing: a block saves only its arguments, and runs again in backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer import ops
from xformer.dispatch import again, contexts, is_inference, overridable
from xformer.layers.block import BlockConfig, block, block_terms
from xformer.layers.residual import Terms
from xformer.showing import short
from xformer.typing import Array


def checkpointed(
    *args: Any,
    config: BlockConfig,
    dropout_key: ops.RandomKey | None = None,
    r: Array | None = None,
    **options: Any,
) -> tuple[Terms, Any]:
    """`block_terms` with activation checkpointing (arXiv:1604.06174).

    For the arguments and results see `block_terms`. Only the arguments are saved. The backward runs
    the forward again: the same operations on the same arrays, with the same dropout bits. So the
    gradients are the same, bit for bit if the library's arithmetic is repeatable. It costs about a
    third of the time of a step.
    """
    if is_inference():  # nothing is saved, which is less than the arguments
        return block_terms(*args, r=r, config=config, dropout_key=dropout_key, **options)
    y, cache = block(*args, config=config, dropout_key=dropout_key, **options)  # one array to save
    router = None
    if config.experts is not None:
        router = RouterCache(cache.router.router_logits, cache.router.ids)
    extended = None if options.get("segment_memory") is None else cache.extended
    about = args, config, dropout_key, options, router, extended
    return (y, None), CheckpointCache(*about, contexts())


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

    args: tuple[Any, ...]  # x, params, memory, bias, pos, memory_pos
    config: BlockConfig
    dropout_key: ops.RandomKey | None
    options: dict[str, Any]
    router: RouterCache | None
    extended: Array | None  # of `attention`, for the next segment memory
    contexts: tuple[Any, ...]  # of the forward

    def backward(self, dy: Array, *drouter_logits: Array) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos, in that order.

        drouter_logits: the gradient of an auxiliary loss on the router, if any.
        """
        return self.again(dy).backward(dy, *drouter_logits)

    def again(self, dy: Array) -> Any:
        """The cache of the block, from a second forward."""
        x, params, memory, *rest = self.args
        x, memory, key = held(x, memory=memory, key=self.dropout_key, dy=dy)
        options = {"config": self.config, "dropout_key": key, **self.options}
        with again(self.contexts):
            return block(x, params, memory, *rest, **options)[1]


@overridable(backward=False)
def held(x: Array, *, memory: Any, key: ops.RandomKey | None, dy: Array) -> tuple[Any, ...]:
    """x, memory and key, unchanged, for a second forward that must run after dy is computed.

    A compiler would merge it with the first forward and keep its activations in memory. So a
    backend that compiles makes all three depend on dy.
    """
    return x, memory, key
