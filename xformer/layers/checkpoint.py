"""Activation checkpointing: a block's forward again in its backward, instead of what it keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer import ops
from xformer.dispatch import is_inference, overridable
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
    """`block_terms`, of which only the arguments are kept (arXiv:1604.06174).

    The backward runs the forward once more: the same operations on the same arrays, and dropout
    draws the same bits, so that gradients are the same, bit for bit where a library's arithmetic
    is repeatable. It costs about a third of the time of a step.
    """
    if is_inference():  # a cache of nothing holds less than the arguments
        return block_terms(*args, r=r, config=config, dropout_key=dropout_key, **options)
    y, cache = block(*args, config=config, dropout_key=dropout_key, **options)  # one array to keep
    router = None
    if config.experts is not None:
        router = RouterCache(cache.router.router_logits, cache.router.ids)
    return (y, None), CheckpointCache(args, config, dropout_key, options, router)


@short
class RouterCache(NamedTuple):
    """What the auxiliary losses of a mixture of experts ask for before the backward."""

    router_logits: Array  # (N, E)
    ids: Array  # (N, C)


@short
class CheckpointCache(NamedTuple):
    """The arguments of a block: x is its own, the others are parameters, or those of all blocks."""

    args: tuple[Any, ...]  # x, params, memory, bias, pos, memory_pos
    config: BlockConfig
    dropout_key: ops.RandomKey | None
    options: dict[str, Any]
    router: RouterCache | None

    def backward(self, dy: Array, *drouter_logits: Array) -> tuple[Any, ...]:
        """As `BlockCache.backward`."""
        x, params, memory, *rest = self.args
        x, memory, key = held(x, memory=memory, key=self.dropout_key, dy=dy)
        _, cache = block(
            x, params, memory, *rest, config=self.config, dropout_key=key, **self.options
        )
        return cache.backward(dy, *drouter_logits)


@overridable(backward=False)
def held(x: Array, *, memory: Any, key: ops.RandomKey | None, dy: Array) -> tuple[Any, ...]:
    """x, memory and key as they are, for a second forward that must wait for dy.

    A compiler would see it to be the first one, keep that, and undo what checkpointing is for: a
    backend that compiles makes all three depend on dy.
    """
    return x, memory, key
