"""Collectives as ops with caches. Each has another one, its transpose, as its backward.

An array is in one of four states. `whole`: every process has the same array, and the same gradient
of it. `addends`: the sum of the processes' arrays is meant; all have the gradient of the sum.
`copies`: every process has the same array and uses it for something else, so that the sum of the
processes' gradients is meant. `parts`: each process has a part of an axis, and its gradient.

| op | from | to | forward | backward |
|---|---|---|---|---|
| `enter` | whole | copies | nothing | all-reduce |
| `leave` | addends | whole | all-reduce | nothing |
| `gather` | parts | copies | all-gather | reduce-scatter |
| `scatter` | addends | parts | reduce-scatter | all-gather |
| `part` | whole | parts | nothing: a slice | all-gather |
| `join` | parts | whole | all-gather | nothing: a slice |
| `exchange` | parts of an axis | parts of another | all-to-all | all-to-all |

All processes must call them in the same order, forward and backward.
Derivation: docs/derivations/collectives.md
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_axis
from xformer.distributed.partition import all_parts, joined, own_part
from xformer.distributed.world import World


@short
class CollectiveCache(NamedTuple):
    """Saved by a collective for backward: its transpose. A linear map needs no other values."""

    transpose: Callable[..., Array]
    world: World
    axes: tuple[int, ...] = ()

    def backward(self, dy: Array) -> Array:
        """dx = the transpose of the collective, of dy."""
        return self.transpose(dy, *self.axes, self.world)


def enter(x: Array, *, world: World) -> tuple[Array, CollectiveCache]:
    """y = x: an array that is whole becomes the input of something different on each process.

    dx = sum of dy over all processes.
    """
    return x, CollectiveCache(_sum, world)


def leave(x: Array, *, world: World) -> tuple[Array, CollectiveCache]:
    """y = sum of x over all processes, the same bits on each. dx = dy."""
    return _sum(x, world), CollectiveCache(_same, world)


def gather(x: Array, *, world: World, axis: int) -> tuple[Array, CollectiveCache]:
    """y = the parts x of all processes along `axis`, as the input of something different on each.

    x: (..., N / W, ...)   y: (..., N, ...), for W processes
    dx = this process's part of the sum of dy over all processes.
    """
    require_axis("gather", x, axis)
    y = joined(x, axis, world)
    require_cut("gather", y, axis, world)
    return y, CollectiveCache(_part_of_sum, world, (axis,))


def scatter(x: Array, *, world: World, axis: int) -> tuple[Array, CollectiveCache]:
    """y = this process's part along `axis` of the sum of x over all processes.

    x: (..., N, ...)   y: (..., N / W, ...), for W processes. ValueError if W does not divide N.
    dx = the parts dy of all processes along the axis.
    """
    require_cut("scatter", x, axis, world)
    return _part_of_sum(x, axis, world), CollectiveCache(joined, world, (axis,))


def part(x: Array, *, world: World, axis: int) -> tuple[Array, CollectiveCache]:
    """y = this process's part along `axis` of an array that is whole.

    x: (..., N, ...)   y: (..., N_rank, ...); the sizes of parts differ by one at most.
    dx = the parts dy of all processes along the axis.
    """
    require_axis("part", x, axis)
    return own_part(x, axis, world), CollectiveCache(joined, world, (axis,))


def join(x: Array, *, world: World, axis: int) -> tuple[Array, CollectiveCache]:
    """y = the parts x of all processes along `axis`, to be used in the same way on each.

    x: (..., N_rank, ...)   y: (..., N, ...), N the sum of all N_rank; parts are those of `part`.
    dx = this process's part of dy, which every process has.
    """
    require_axis("join", x, axis)
    return joined(x, axis, world), CollectiveCache(own_part, world, (axis,))


def exchange(x: Array, *, world: World, cut: int, join: int) -> tuple[Array, CollectiveCache]:
    """y: parts of the axis `cut` instead of parts of the axis `join`. dx = dy, exchanged back.

    x: N whole at `cut`, M / W at `join`   y: N / W at `cut`, M whole at `join`, for W processes.
    ValueError if W does not divide N.
    """
    require_cut("exchange", x, cut, world)
    return _exchanged(x, cut, join, world), CollectiveCache(_exchanged, world, (join, cut))


def _same(x: Array, world: World) -> Array:
    return x


def _sum(x: Array, world: World) -> Array:
    return world.all_reduce(x)


def _part_of_sum(x: Array, axis: int, world: World) -> Array:
    return world.reduce_scatter(all_parts(x, axis, world))


def _exchanged(x: Array, cut: int, join: int, world: World) -> Array:
    parts = world.all_to_all(all_parts(x, cut, world))
    return array_namespace(x).concat(parts, axis=join)


def require_cut(op: str, x: Array, axis: int, world: World) -> None:
    """ValueError unless the processes divide the axis, as equal parts are sent."""
    require_axis(op, x, axis)
    if x.shape[axis] % world.size:
        raise ValueError(
            f"{op}: {world.size} processes must divide axis {axis} of the whole array, "
            f"got shape {tuple(x.shape)}"
        )
