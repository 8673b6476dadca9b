"""Mean squared error."""

from __future__ import annotations

import math
from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._loss import one


@overridable
@shapes("x (...)  y (...)")
def mse(x: Array, y: Array) -> tuple[Array, MseCache]:
    """loss = mean((x - y)^2) over all elements; 0 if there are none.

    x, y: the same shape   loss: (). ValueError if shapes differ.
    Derivation: docs/derivations/mse.md
    """
    xp = array_namespace(x)
    diff = x - y
    return xp.sum(diff**2) / max(math.prod(x.shape), 1), MseCache(diff)


@short
class MseCache(NamedTuple):
    """Saved by `mse` for backward: x - y, to which both gradients are proportional."""

    diff: Array  # x - y

    def backward(self, dloss: Array | None = None) -> tuple[Array, Array]:
        """dx = dloss * 2 (x - y) / N, dy = -dx."""
        dloss = one(self.diff) if dloss is None else dloss
        require_gradient("mse", "dloss", dloss, self.diff, ())
        dx = dloss * self.diff * (2 / max(math.prod(self.diff.shape), 1))
        return dx, -dx
