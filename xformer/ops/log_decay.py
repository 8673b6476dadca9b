"""The decay of a recurrent state, from one number a head and step."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops.sigmoid import stable_sigmoid


@overridable
@shapes("x (..., H)  log_rate (H)")
def log_decay(x: Array, log_rate: Array) -> tuple[Array, LogDecayCache]:
    """y = -exp(log_rate) * softplus(x), the logarithm of a decay (arXiv:2405.21060).

    softplus(x) = log(1 + exp(x)). A state is multiplied by exp(y), which is between 0 and 1.

    x, y: (..., H)   log_rate: (H,), of each head

    ValueError if shapes do not fit. Derivation: docs/derivations/log_decay.md
    """
    xp = array_namespace(x)
    softplus = xp.maximum(x, 0.0) + xp.log1p(xp.exp(-xp.abs(x)))
    y = -xp.exp(log_rate) * softplus
    return y, LogDecayCache(x, y, log_rate)


@short
class LogDecayCache(NamedTuple):
    """Saved by `log_decay` for backward: x, y, and log_rate."""

    x: Array  # (..., H)
    y: Array  # (..., H)
    log_rate: Array  # (H,)

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """dx = -exp(log_rate) * sigmoid(x) * dy, dlog_rate = sum of y * dy over the rows."""
        require_gradient("log_decay", "dy", dy, self.y)
        xp = array_namespace(dy)
        rows = tuple(range(dy.ndim - 1))
        dx = -xp.exp(self.log_rate) * stable_sigmoid(self.x) * dy
        return dx, xp.sum(self.y * dy, axis=rows)
