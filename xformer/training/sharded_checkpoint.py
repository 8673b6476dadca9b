"""Sharded optimiser states in checkpoints: the whole state on process 0, and each process's part.

The whole state is a dict of all leaves by the dotted names that they have without sharding. So a
checkpoint does not depend on the number of processes.
"""

from __future__ import annotations

from typing import Any

from xformer.backends import Backend
from xformer.base import tree
from xformer.distributed.world import World
from xformer.optim import ShardedState
from xformer.training.state import is_number


def is_sharded(state: Any, world: World) -> bool:
    """Whether a state of an optimiser is sharded. ValueError if the processes differ in this."""
    mine = bool(_nodes(state))  # also if this process has no leaves of it
    for rank, other in enumerate(world.gather(mine)):
        if other != mine:
            raise ValueError(
                f"the processes differ: the optimiser of process {rank if other else world.rank} "
                f"is sharded, that of process {world.rank if other else rank} is not"
            )
    return mine


def gathered(state: Any, world: World, backend: Backend) -> dict[str, Any]:
    """The whole state on process 0; on the others their own part. All processes call it."""
    names = _names(state)
    leaves = {names.get(name, name): leaf for name, leaf in tree.flatten(state).items()}
    theirs = world.gather([name for name in names.values() if not is_number(leaves[name])])
    if world.rank:
        for name in theirs[world.rank]:
            world.send(leaves[name], 0)
        return leaves
    for rank in range(1, world.size):
        leaves |= {name: backend.asarray(world.receive(rank)) for name in theirs[rank]}
    return leaves


def scattered(whole: dict[str, Any], like: Any, world: World, backend: Backend) -> Any:
    """Each process's part of a state. All processes call it.

    whole: of `gathered`, on process 0; the others' is not used
    like: a state of this process, for its structure
    """
    names = _names(like)
    wanted = world.gather([names.get(name, name) for name in tree.flatten(like)])
    numbers = {} if world.rank else {n: leaf for n, leaf in whole.items() if is_number(leaf)}
    numbers = world.broadcast(numbers)
    for rank in range(1, world.size) if world.rank == 0 else ():
        for name in wanted[rank]:
            if name not in numbers:
                world.send(whole[name], rank)

    def part(name: str) -> Any:
        if world.rank == 0 or name in numbers:
            return (numbers if world.rank else whole)[name]
        return backend.asarray(world.receive(0))

    parts = [part(name) for name in wanted[world.rank]]
    return tree.unflatten(like, dict(zip(tree.flatten(like), parts, strict=True)))


def _nodes(state: Any) -> dict[str, ShardedState]:
    nodes: dict[str, ShardedState] = {}
    tree.map_nodes(nodes.setdefault, state, ShardedState)
    return nodes


def _names(state: Any) -> dict[str, str]:
    """The names of the leaves of each `ShardedState`, and their names in the whole state."""
    names: dict[str, str] = {}
    for path, node in _nodes(state).items():
        for name in tree.flatten(node):
            whole = name.removeprefix("own").removeprefix(".")
            names[f"{path}.{name}".strip(".")] = f"{path}.{whole}".strip(".")
    return names
