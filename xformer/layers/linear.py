"""A linear map, plain or with a low-rank adapter; several of the same x."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

from xformer import ops
from xformer.backends import Generator
from xformer.dispatch import overridable
from xformer.initializers import Draw
from xformer.showing import short
from xformer.tree import Constant, Frozen, value
from xformer.typing import Array


@short
class LinearParams(NamedTuple):
    """For `linear`."""

    w: Array  # (I, O)
    b: Array | None  # (O,)

    @staticmethod
    def init(rng: Generator, shape: tuple[int, int], *, draw: Draw, bias: bool) -> LinearParams:
        """Weights by `draw`, bias zero."""
        return LinearParams(draw(rng, shape), rng.full(shape[1:], 0.0) if bias else None)


@short
class LoRAParams(NamedTuple):
    """A linear map with a low-rank adapter (arXiv:2106.09685), in the place of LinearParams."""

    base: LinearParams  # frozen, as a rule
    a: Array  # (I, R)
    b: Array  # (R, O), zero at first
    scale: Constant  # alpha / R


def linear(x: Array, params: LinearParams | LoRAParams) -> tuple[Array, LinearCache | LoRACache]:
    """y = x w + b, and with an adapter + scale * (x a) b. x: (..., I)   y: (..., O)."""
    if isinstance(params, LoRAParams):
        y, base = linear(x, params.base)
        low, down = linear(x, LinearParams(params.a, None))  # (..., R)
        more, up = linear(low, LinearParams(params.b, None))
        return y + more * params.scale.value, LoRACache(base, down, up, params.scale)
    fixed = (isinstance(params.w, Frozen), isinstance(params.b, Frozen))
    y, cache = ops.linear(x, value(params.w), value(params.b), fixed=fixed[0])
    return y, LinearCache(cache, fixed[1])


@short
class LinearCache(NamedTuple):
    """What `linear` keeps for its backward."""

    op: Any  # of the kernel that ran
    fixed_b: bool

    def backward(self, dy: Array) -> tuple[Array, LinearParams]:
        """Gradients of x and params; None for what is frozen."""
        dx, dw, db = self.op.backward(dy)
        return dx, LinearParams(dw, None if self.fixed_b else db)


@short
class LoRACache(NamedTuple):
    """What `linear` keeps for its backward where there is an adapter."""

    base: Any  # of `linear`, as the next two
    down: Any
    up: Any
    scale: Constant

    def backward(self, dy: Array) -> tuple[Array, LoRAParams]:
        """Gradients of x and params."""
        dx, dbase = self.base.backward(dy)
        dlow, dup = self.up.backward(dy * self.scale.value)
        dx_low, ddown = self.down.backward(dlow)
        return dx + dx_low, LoRAParams(dbase, ddown[0], dup[0], self.scale)


@overridable
def linear_many(
    x: Array, params: tuple[LinearParams | LoRAParams, ...], *, all_kept: bool = False
) -> tuple[tuple[Array, ...], LinearsCache]:
    """`linear` of the same x by several params, as to queries, keys and values. x: (..., I).

    all_kept: whether a backward needs every y, so that a kernel may put all of them in one array.
    """
    ys, caches = zip(*(linear(x, own) for own in params), strict=True)
    return ys, LinearsCache(caches)


@short
class LinearsCache(NamedTuple):
    """What `linear_many` keeps for its backward."""

    maps: tuple[LinearCache | LoRACache, ...]

    @property
    def x(self) -> Array:
        """What came in, where the first map is plain and trained."""
        return self.maps[0].op.x  # type: ignore[union-attr]

    def backward(self, *dys: Array) -> tuple[Array, tuple[LinearParams | LoRAParams, ...]]:
        """Gradients of x, to which all maps add, and of params."""
        dxs, dparams = zip(
            *(cache.backward(dy) for cache, dy in zip(self.maps, dys, strict=True)), strict=True
        )
        return functools.reduce(operator.add, dxs), dparams
