"""Optimisers whose state is shared out among processes (ZeRO-1, arXiv:1910.02054)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from array_api_compat import device

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.optim._checks import matching, require_arrays, require_state
from xformer.optim.flat import _joined, _parts
from xformer.optim.optimiser import GroupedStep, Optimiser, grouped

if TYPE_CHECKING:
    from xformer.distributed.world import World


@short
class ShardedState(NamedTuple):
    """The state of a sharded optimiser in one process."""

    own: Any  # the state of the inner optimiser, for the leaves of this process


def sharded(optimiser: Optimiser, world: World) -> Optimiser:
    """An optimiser that keeps the state of whole leaves on one process each (arXiv:1910.02054).

    Each process updates its leaves and gets the new values of the others. The bits are those of
    `optimiser`, if it treats leaves one by one, as all of `OPTIMISERS` do. The largest leaf goes
    first, each to the process with the fewest numbers so far; of `grouped`, the leaves of each
    rule are shared out.

    optimiser: any; its states must be trees with the names of the leaves, as all of them are
    world: the processes. All call `step`, with the same params, grads and lr. For one process the
        result is `optimiser` itself.

    Training checkpoints (`training.Run`) hold the whole state.
    """
    if world.size == 1:
        return optimiser
    if isinstance(optimiser.step, GroupedStep):
        rules = optimiser.step.rules
        return grouped(
            *(dataclasses.replace(rule, optimiser=sharded(rule.pair, world)) for rule in rules)
        )

    def init(params: Any) -> ShardedState:
        leaves = tree.flatten(params)
        require_arrays("sharded", leaves)
        rank_of = owners(leaves, world.size)
        return ShardedState(optimiser.init(_of(world.rank, leaves, rank_of)))

    def step(
        params: Any,
        grads: Any,
        state: ShardedState,
        *,
        lr: Any,
        donate: bool = False,
        **options: Any,
    ) -> tuple[Any, ShardedState]:
        require_state("sharded", state, ShardedState)
        leaves = tree.flatten(params)
        named_grads = matching("sharded", leaves, grads, "the gradient")
        rank_of = owners(leaves, world.size)
        own, own_grads = (_of(world.rank, part, rank_of) for part in (leaves, named_grads))
        options = {"lr": lr, "donate": donate, **options}
        new, own_state = optimiser.step(own, own_grads, state.own, **options)
        stepped = _of_all(tree.flatten(new), leaves, rank_of, world)
        return tree.unflatten(params, stepped), ShardedState(own_state)

    return Optimiser(init, step)


def owners(leaves: Mapping[str, Array], size: int) -> dict[str, int]:
    """The process of each leaf: the largest leaf first, to the process with the least so far."""
    load, rank_of = [0] * size, {}
    sizes = {name: math.prod(leaf.shape) for name, leaf in leaves.items()}
    for name in sorted(leaves, key=lambda name: (-sizes[name], name)):
        rank_of[name] = load.index(min(load))
        load[rank_of[name]] += sizes[name]
    return rank_of


def _of(rank: int, leaves: Mapping[str, Array], rank_of: Mapping[str, int]) -> dict[str, Array]:
    return {name: leaf for name, leaf in leaves.items() if rank_of[name] == rank}


def _of_all(
    new: Mapping[str, Array], old: Mapping[str, Array], rank_of: Mapping[str, int], world: World
) -> dict[str, Array]:
    """The new leaves of all processes, in the order of `old`; one collective for each dtype."""
    stepped: dict[str, Array] = dict(old)
    for dtype in dict.fromkeys(str(leaf.dtype) for leaf in old.values()):
        names = [name for name, leaf in old.items() if str(leaf.dtype) == dtype]
        own = [new[name] for name in names if rank_of[name] == world.rank]
        like = old[names[0]]
        empty = array_namespace(like).zeros(0, dtype=like.dtype, device=device(like))
        for rank, flat in enumerate(world.all_gather(_joined(own) if own else empty)):
            theirs = [name for name in names if rank_of[name] == rank]
            # This process keeps its own arrays, which the next step may overwrite: those that
            # were sent may be in the memory of others too.
            arrays = own if rank == world.rank else _parts(flat, [old[name] for name in theirs])
            stepped |= zip(theirs, arrays, strict=True)
    return stepped
