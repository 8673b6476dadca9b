"""Linear layers, with or without a LoRA adapter, several of the same input, and a bias alone."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

from xformer import ops
from xformer.base.printing import short
from xformer.base.tree import Constant, Frozen, value
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import require_gradient, require_shape
from xformer.dispatch.shapes import require_like
from xformer.initializers import Draw
from xformer.ops.sum_to import sum_to


@short
class LinearParams(NamedTuple):
    """Parameters of `linear`, y = x w + b. w is the transpose of torch's weight.

    b: None without a bias. Both may be `tree.Frozen`.
    """

    w: Array  # (I, O)
    b: Array | None  # (O,)

    @staticmethod
    def init(
        rng: Generator, shape: tuple[int, int], *, draw: Draw, bias: bool, scale: float = 1.0
    ) -> LinearParams:
        """Initial parameters: weights by `draw`, times `scale`; a bias of 0 if `bias`."""
        w, b = draw(rng, shape), rng.full(shape[1:], 0.0) if bias else None
        return LinearParams(w if scale == 1.0 else w * scale, b)


@short
class LoRAParams(NamedTuple):
    """Parameters of `linear` with a LoRA adapter (arXiv:2106.09685), instead of LinearParams."""

    base: LinearParams  # usually frozen
    a: Array  # (I, R)
    b: Array  # (R, O), initially 0
    scale: Constant  # alpha / R


@short
class BiasParams(NamedTuple):
    """Parameters of `linear` without a product, y = x + b, instead of LinearParams."""

    b: Array  # (I,)


def linear(
    x: Array, params: LinearParams | LoRAParams | BiasParams
) -> tuple[Array, LinearCache | LoRACache | BiasCache]:
    """y = x w + b; with a LoRA adapter y = x w + b + scale * (x a) b; of BiasParams y = x + b.

    x: (..., I)   y: (..., O). ValueError for shapes that do not fit.
    """
    if isinstance(params, BiasParams):
        b = value(params.b)
        require_like("linear", "b", b, x)
        require_shape("linear", "b", b, x.shape[-1:])
        return x + b, BiasCache(b, tuple(x.shape), isinstance(params.b, Frozen))
    if isinstance(params, LoRAParams):
        y, base = linear(x, params.base)
        low, down = linear(x, LinearParams(params.a, None))  # (..., R)
        more, up = linear(low, LinearParams(params.b, None))
        return y + more * params.scale.value, LoRACache(base, down, up, params.scale)
    frozen = (isinstance(params.w, Frozen), isinstance(params.b, Frozen))
    y, cache = ops.linear(x, value(params.w), value(params.b), trainable=not frozen[0])
    return y, LinearCache(cache, frozen[1])


@short
class LinearCache(NamedTuple):
    """Saved by `linear` for backward: the cache of the op, and whether b is frozen."""

    op: Any  # of the kernel that ran; it computes no dw if w is frozen
    frozen_b: bool

    def backward(self, dy: Array) -> tuple[Array, LinearParams]:
        """Gradients of x and params; None for frozen ones."""
        dx, dw, db = self.op.backward(dy)
        return dx, LinearParams(dw, None if self.frozen_b else db)


@short
class BiasCache(NamedTuple):
    """Saved by `linear` of BiasParams for backward: b, for its dtype, and the shape of x."""

    b: Array
    x_shape: tuple[int, ...]
    frozen_b: bool

    def backward(self, dy: Array) -> tuple[Array, BiasParams]:
        """Gradients of x, which is dy, and params; None for a frozen one."""
        require_gradient("linear", "dy", dy, self.b, self.x_shape)
        db = None if self.frozen_b else sum_to(dy, shape=self.x_shape[-1:])
        return dy, BiasParams(db)


@short
class LoRACache(NamedTuple):
    """Saved by `linear` with a LoRA adapter for backward: the caches of its three products."""

    base: Any  # cache of x w + b
    down: Any  # cache of x a
    up: Any  # cache of (x a) b
    scale: Constant

    def backward(self, dy: Array) -> tuple[Array, LoRAParams]:
        """Gradients of x and params."""
        dx, dbase = self.base.backward(dy)
        dlow, dup = self.up.backward(dy * self.scale.value)
        dx_low, ddown = self.down.backward(dlow)
        return dx + dx_low, LoRAParams(dbase, ddown[0], dup[0], self.scale)


@overridable(composite=True)
def linear_many(
    x: Array, params: tuple[LinearParams | LoRAParams, ...], *, all_kept: bool = False
) -> tuple[tuple[Array, ...], LinearsCache]:
    """Several `linear` layers of the same x, such as those to queries, keys and values.

    x: (..., I)   ys: (..., O) for each of params. ValueError for shapes that do not fit.
    all_kept: whether backward needs every y, so that a kernel may store them in one array.
    """
    ys, caches = zip(*(linear(x, layer) for layer in params), strict=True)
    return ys, LinearsCache(caches)


@short
class LinearsCache(NamedTuple):
    """Saved by `linear_many` for backward: the cache of each linear layer."""

    maps: tuple[LinearCache | LoRACache, ...]

    @property
    def x(self) -> Array:
        """The input. The first layer must be trained and have no adapter."""
        return self.maps[0].op.x  # type: ignore[union-attr]

    def backward(self, *dys: Array) -> tuple[Array, tuple[LinearParams | LoRAParams, ...]]:
        """Gradients of x, the sum over all layers, and of params."""
        dxs, dparams = zip(
            *(cache.backward(dy) for cache, dy in zip(self.maps, dys, strict=True)), strict=True
        )
        return functools.reduce(operator.add, dxs), dparams
