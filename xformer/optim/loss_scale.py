"""Loss scaling, so that small gradients do not underflow in float16."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import number, require_sizes
from xformer.optim._checks import require_arrays

SMALLEST = 2.0**-126  # the smallest normal number of float32


class LossScale(NamedTuple):
    """The dynamic loss scale (arXiv:1710.03740, section 3.2), as torch's GradScaler.

    scale = LossScale()
    loss, cache = model.loss(half, tokens, targets)            # half: params in float16
    grads, finite = scale.unscale(cache.backward(scale.dloss(loss)), params)
    if finite:                                                 # else neither step nor schedule move
        params, state = adamw(params, grads, state, lr=lr)
    scale = scale.update(finite)
    """

    scale: float = 65536.0
    good_steps: int = 0  # steps without overflow since the scale changed

    def dloss(self, loss: Array) -> Array:
        """The gradient with which to call backward: the scale, like `loss`."""
        return array_namespace(loss).full_like(loss, self.scale)

    def unscale(self, grads: Any, params: Any) -> tuple[Any, bool]:
        """Gradients in the dtypes of `params`, divided by the scale, and whether all are finite.

        It reads array values, so it fails under `jax.jit`. ValueError if there are no gradients.
        """
        for leaves in (params, grads):
            require_arrays("unscale", tree.flatten(leaves))
        factor = 1.0 / self.scale

        def unscaled(p: Array, g: Array) -> Array:
            return array_namespace(g).astype(g, p.dtype) * factor

        wide = tree.map(unscaled, params, grads)
        leaves = list(tree.flatten(wide).values())
        if not leaves:
            raise ValueError("unscale: there are no gradients")
        xp = array_namespace(leaves[0])
        return wide, bool(xp.all(xp.stack([xp.all(xp.isfinite(g)) for g in leaves])))

    def update(
        self, finite: bool, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> LossScale:
        """The scale for the next step.

        finite: whether all gradients of this step were finite, as `unscale` returns it.
        growth: the factor after `interval` finite steps in a row.
        backoff: the factor after a step that was not finite.

        ValueError for a growth below 1, a backoff outside [0, 1], and an interval below 1.
        FloatingPointError if the scale would fall below `SMALLEST`: then the gradients are not
        finite without a scale either.
        """
        growth = number("update", "growth", growth, low=1)
        backoff = number("update", "backoff", backoff, low=0, high=1)
        (interval,) = require_sizes("update", 1, interval=interval)
        if not finite:
            if self.scale * backoff < SMALLEST:
                raise FloatingPointError(
                    f"update: gradients are not finite at a scale of {self.scale:.3g} either: "
                    "it is the loss or the parameters that are not"
                )
            return LossScale(self.scale * backoff)
        if self.good_steps + 1 < interval:
            return LossScale(self.scale, self.good_steps + 1)
        grown = self.scale * growth
        return LossScale(grown if math.isfinite(grown) else self.scale)


class Scaled(NamedTuple):
    """The cache of a loss, whose gradients are multiplied by a factor."""

    cache: Any
    factor: float

    def backward(self, dloss: Array) -> Any:
        """Gradients of the parameters, multiplied by the factor."""
        return self.cache.backward(dloss * self.factor)
