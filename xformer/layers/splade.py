"""SPLADE: one sparse vector over the vocabulary for a sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.base.choices import require_one_of
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import saved
from xformer.dispatch.checks import require_gradient
from xformer.layers.pooling import pool

POOLINGS = ("max", "sum")
SATURATIONS = ("log", "log_log")


def splade(
    logits: Array, *, pooling: str = "max", saturation: str = "log", mask: Array | None = None
) -> tuple[Array, SpladeCache]:
    """y_v = max_t log(1 + max(0, logits_tv)), or the sum over the tokens t.

    logits: (B, T, V) of a masked language model   y: (B, V), 0 or more
    pooling: "max" (SPLADE v2, arXiv:2109.10086) or "sum" (arXiv:2107.05720, eq. 4)
    saturation: "log", or "log_log": log(1 + log(1 + max(0, x))) (arXiv:2504.14839)
    mask: (B, T), True = a token, False = padding; None: no padding
    ValueError for other names and for shapes that do not fit.

    The maximum is taken first, of the logits, as the function is monotonic.
    """
    require_one_of("splade: pooling", pooling, POOLINGS)
    require_one_of("splade: saturation", saturation, SATURATIONS)
    if pooling == "max":
        x, pooled = pool(logits, pooling="max", mask=mask)
        return _saturated(x, saturation), saved(SpladeCache(x, pooled, True, saturation))
    y, pooled = pool(_saturated(logits, saturation), pooling="sum", mask=mask)
    return y, saved(SpladeCache(logits, pooled, False, saturation))


@short
class SpladeCache(NamedTuple):
    """Saved by `splade` for backward: what is saturated, and how the tokens are pooled."""

    x: Array  # (B, V), the maxima; for the sum (B, T, V), the logits
    pool: Any  # of `layers.pool`
    is_pooled: bool  # whether x is pooled
    saturation: str

    def backward(self, dy: Array) -> Array:
        """dx = dy / (1 + x) where x > 0, else 0, for each token that y was taken from.

        For "log_log" dx = dy / ((1 + x) (1 + log(1 + x))).
        """
        require_gradient("splade", "dy", dy, self.x, (self.x.shape[0], self.x.shape[-1]))
        xp = array_namespace(dy)
        high = xp.maximum(self.x, 0.0)
        slope = 1 / (1 + high)
        if self.saturation == "log_log":
            slope = slope / (1 + xp.log1p(high))
        slope = xp.where(self.x > 0, slope, 0.0)
        dx: Array = (
            self.pool.backward(dy * slope) if self.is_pooled else (self.pool.backward(dy) * slope)
        )
        return dx


def _saturated(x: Array, saturation: str) -> Array:
    xp = array_namespace(x)
    y = xp.log1p(xp.maximum(x, 0.0))
    return xp.log1p(y) if saturation == "log_log" else y
