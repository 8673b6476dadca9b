"""`linear_cross_entropy` in NumPy's chunks, whose logits become their own gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.compiled import LOG2_E, PLAIN, exp2, less, rowwise
from xformer.backends.numba.flash_rows import ONE, ZERO, highest, multiply
from xformer.backends.numpy.ids import private
from xformer.backends.numpy.linear_cross_entropy import (
    LinearCrossEntropyCache,
    cache_of,
    in_chunks,
    kept_rows,
)

from xformer.checks import finite, number
from xformer.dispatch import keeps_nothing
from xformer.ops.cross_entropy import require_options
from xformer.typing import Array


def outside(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    fixed: bool = False,
) -> str | None:
    """Why the kernel cannot run."""
    if reduction == "none":
        return 'reduction "none" has a dloss for each token'
    if w.shape[1] == 0 or x.dtype != np.float32:
        return "only float32, and at least one class"
    return None


def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    fixed: bool = False,
) -> tuple[Array, LinearCrossEntropyCache | None]:
    """The loss, and its gradients unless within `inference()`. Ignored tokens are left out."""
    a = number("cross_entropy", "label_smoothing", label_smoothing, low=0, high=1)
    z = finite("cross_entropy", "z_loss", z_loss)
    require_options(ignore_index, reduction)
    xs, targets, chosen = kept_rows(x, w, private(targets), ignore_index)
    xs, targets = np.require(xs, None, PLAIN), np.require(targets, None, PLAIN)
    weight = np.float32(1 / max(len(xs), 1) if reduction == "mean" else 1.0)
    numbers = np.array([a, z, weight], np.float32)
    losses, back = np.empty(len(xs), np.float32), not keeps_nothing()

    def differentiate(logits: Array, at: slice) -> None:
        differentiate_rows(logits, targets[at], numbers, losses[at])

    grads = in_chunks(xs, w, b, differentiate, back=back, fixed=fixed)
    return np.add.reduce(losses) * weight, cache_of(grads, x.shape, chosen)


@rowwise
def differentiate_rows(x: Any, targets: Any, numbers: Any, losses: Any) -> None:
    """losses (N,) of logits (N, V), which become their gradients."""
    for i in range(len(x)):
        losses[i] = _loss(x[i], targets[i], numbers)


@rowwise
def _loss(x: Any, target: int, numbers: Any) -> Any:
    """That of a token's logits, which become their gradient."""
    a, z, weight = numbers
    top = highest(x)
    hit, sum_of_all = less(x[target], top), ZERO  # lse - x would lose log(sum) where top is large
    if a > ZERO:
        for j in range(len(x)):
            sum_of_all += less(x[j], top)
    total = _powers(x, top)
    loss = np.log(total)  # lse - top
    lse = loss + top
    if z != ZERO:  # a factor of 0 would make NaN of what is too large
        loss += z * lse * lse
    if a < ONE:  # a factor of 0 would make NaN of a logit of -inf
        loss -= (ONE - a) * hit
    if a > ZERO:
        loss -= a * (sum_of_all / len(x))
    multiply(x, weight * (ONE + (ONE + ONE) * z * lse) / total, x)
    x[target] -= weight * (ONE - a)
    if a > ZERO:
        for j in range(len(x)):
            x[j] -= weight * a / len(x)
    return loss


@rowwise
def _powers(x: Any, top: Any) -> Any:
    """x = exp(x - top); their sum."""
    total = ZERO
    for j in range(len(x)):
        e = exp2((x[j] - top) * LOG2_E)
        x[j] = e
        total += e
    return total
