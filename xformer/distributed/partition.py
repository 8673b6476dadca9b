"""How an axis is cut among processes: contiguous parts, in order of rank."""

from __future__ import annotations

import math

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.distributed.world import World


def bounds(n: int, world: World, rank: int | None = None) -> tuple[int, int]:
    """The first and one past the last index of a rank's part of [0, n).

    Sizes of parts differ by one at most. rank: None: of this process
    """
    rank = world.rank if rank is None else rank
    return n * rank // world.size, n * (rank + 1) // world.size


def own_size(n: int, world: World) -> int:
    """The size of this process's part of [0, n)."""
    first, last = bounds(n, world)
    return last - first


def part_of(x: Array, axis: int, first: int, last: int) -> Array:
    """x[..., first:last, ...] at `axis`."""
    index = [slice(None)] * x.ndim
    index[axis] = slice(first, last)
    return x[tuple(index)]


def own_part(x: Array, axis: int, world: World) -> Array:
    """This process's part of an array that every process has."""
    return part_of(x, axis, *bounds(x.shape[axis], world))


def all_parts(x: Array, axis: int, world: World) -> list[Array]:
    """The part of every process, in order of rank."""
    n = x.shape[axis]
    return [part_of(x, axis, *bounds(n, world, rank)) for rank in range(world.size)]


def reduced(arrays: list[Array], world: World) -> list[Array]:
    """The sum of each array over all processes, by one all-reduce."""
    if not arrays:
        return []
    xp = array_namespace(*arrays)
    flat = world.all_reduce(xp.concat([xp.reshape(x, (-1,)) for x in arrays]))
    sums, first = [], 0
    for x in arrays:
        last = first + math.prod(x.shape)
        sums.append(xp.reshape(flat[first:last], x.shape))
        first = last
    return sums


def joined(x: Array, axis: int, world: World) -> Array:
    """The array whose parts the processes have: the inverse of `own_part`.

    ValueError for a part of another size than that of `own_part`.
    """
    parts = world.all_gather(x)
    y = array_namespace(x).concat(parts, axis=axis)
    first, last = bounds(y.shape[axis], world)
    if x.shape[axis] != last - first:
        raise ValueError(
            f"join: part {world.rank} of {world.size} of {y.shape[axis]} must have "
            f"{last - first} at axis {axis}, got shape {tuple(x.shape)}"
        )
    return y
