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

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_axis
from xformer.distributed.partition import all_parts, joined, own_part
from xformer.distributed.world import World


def enter(x: Array, *, world: World) -> tuple[Array, EnterCache]:
    """y = x: an array that is whole becomes the input of something different on each process."""
    return x, EnterCache(world)


@short
class EnterCache(NamedTuple):
    """Saved by `enter` for backward: only the processes, as y does not depend on values."""

    world: World

    def backward(self, dy: Array) -> Array:
        """dx = sum of dy over all processes."""
        return self.world.all_reduce(dy)


def leave(x: Array, *, world: World) -> tuple[Array, LeaveCache]:
    """y = sum of x over all processes, the same bits on each."""
    return world.all_reduce(x), LeaveCache()


@short
class LeaveCache(NamedTuple):
    """Saved by `leave` for backward: nothing."""

    def backward(self, dy: Array) -> Array:
        """dx = dy."""
        return dy


def gather(x: Array, *, world: World, axis: int) -> tuple[Array, GatherCache]:
    """y = the parts x of all processes along `axis`, as the input of something different on each.

    x: (..., N / W, ...)   y: (..., N, ...), for W processes
    """
    require_axis("gather", x, axis)
    y = joined(x, axis, world)
    require_cut("gather", y, axis, world)
    return y, GatherCache(world, axis)


@short
class GatherCache(NamedTuple):
    """Saved by `gather` for backward: the processes and the axis."""

    world: World
    axis: int

    def backward(self, dy: Array) -> Array:
        """dx = this process's part of the sum of dy over all processes."""
        return self.world.reduce_scatter(all_parts(dy, self.axis, self.world))


def scatter(x: Array, *, world: World, axis: int) -> tuple[Array, ScatterCache]:
    """y = this process's part along `axis` of the sum of x over all processes.

    x: (..., N, ...)   y: (..., N / W, ...), for W processes. ValueError if W does not divide N.
    """
    require_cut("scatter", x, axis, world)
    return world.reduce_scatter(all_parts(x, axis, world)), ScatterCache(world, axis)


@short
class ScatterCache(NamedTuple):
    """Saved by `scatter` for backward: the processes and the axis."""

    world: World
    axis: int

    def backward(self, dy: Array) -> Array:
        """dx = the parts dy of all processes along the axis."""
        return joined(dy, self.axis, self.world)


def part(x: Array, *, world: World, axis: int) -> tuple[Array, PartCache]:
    """y = this process's part along `axis` of an array that is whole.

    x: (..., N, ...)   y: (..., N_rank, ...); the sizes of parts differ by one at most.
    """
    require_axis("part", x, axis)
    return own_part(x, axis, world), PartCache(world, axis)


@short
class PartCache(NamedTuple):
    """Saved by `part` for backward: the processes and the axis."""

    world: World
    axis: int

    def backward(self, dy: Array) -> Array:
        """dx = the parts dy of all processes along the axis."""
        return joined(dy, self.axis, self.world)


def join(x: Array, *, world: World, axis: int) -> tuple[Array, JoinCache]:
    """y = the parts x of all processes along `axis`, to be used in the same way on each.

    x: (..., N_rank, ...)   y: (..., N, ...), N the sum of all N_rank; parts are those of `part`.
    """
    require_axis("join", x, axis)
    return joined(x, axis, world), JoinCache(world, axis)


@short
class JoinCache(NamedTuple):
    """Saved by `join` for backward: the processes and the axis."""

    world: World
    axis: int

    def backward(self, dy: Array) -> Array:
        """dx = this process's part of dy, which every process has."""
        return own_part(dy, self.axis, self.world)


def exchange(x: Array, *, world: World, cut: int, join: int) -> tuple[Array, ExchangeCache]:
    """y: parts of the axis `cut` instead of parts of the axis `join`.

    x: N whole at `cut`, M / W at `join`   y: N / W at `cut`, M whole at `join`, for W processes.
    ValueError if W does not divide N.
    """
    require_cut("exchange", x, cut, world)
    return _exchanged(x, world, cut, join), ExchangeCache(world, cut, join)


@short
class ExchangeCache(NamedTuple):
    """Saved by `exchange` for backward: the processes and both axes."""

    world: World
    cut: int
    join: int

    def backward(self, dy: Array) -> Array:
        """dx = dy, exchanged back."""
        return _exchanged(dy, self.world, self.join, self.cut)


def _exchanged(x: Array, world: World, cut: int, join: int) -> Array:
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
