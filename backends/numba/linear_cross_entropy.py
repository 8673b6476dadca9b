"""`linear_cross_entropy`: logits become their own gradient, each row while it is near a core.

Of few classes each thread's rows go through all of it in one call; of many in NumPy's chunks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from xformer.backends.numba import maps
from xformer.backends.numba.compiled import LOG2_E, PLAIN, exp2, less, rowwise
from xformer.backends.numba.flash_rows import ONE, ZERO, highest, multiply
from xformer.backends.numba.gemm import no_products, products
from xformer.backends.numba.layer import BIAS
from xformer.backends.numba.plan import Unfit, map_of
from xformer.backends.numpy.blocks import ROWS
from xformer.backends.numpy.ids import private
from xformer.backends.numpy.linear_cross_entropy import (
    LARGE,
    Gradients,
    LinearCrossEntropyCache,
    cache_of,
    in_chunks,
    kept_rows,
)
from xformer.backends.numpy.threads import n_threads, run, scratch

from xformer.checks import finite, number
from xformer.dispatch import keeps_nothing
from xformer.layers.linear import LinearParams
from xformer.ops.cross_entropy import require_options
from xformer.typing import Array

LOGITS = 1 << 19  # at once: near a core, and of 4095 classes rows enough for fast products


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
    if w.shape[1] >= LARGE:
        return None
    threads = n_threads()
    size = -(-math.prod(x.shape[:-1]) // threads)
    if size < ROWS * (threads - 1):
        return f"{size} tokens are too few for a thread"
    try:
        map_of(LinearParams(w, b), *w.shape)
    except Unfit as unfit:
        return str(unfit)
    return no_products()


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
    if w.shape[1] < LARGE:
        grads = _in_shares(xs, w, b, targets, numbers, losses, back=back, fixed=fixed)
    else:

        def differentiate(logits: Array, at: slice) -> None:
            differentiate_rows(logits, targets[at], numbers, losses[at])

        grads = in_chunks(xs, w, b, differentiate, back=back, fixed=fixed)
    return np.add.reduce(losses) * weight, cache_of(grads, x.shape, chosen)


def _in_shares(
    x: Array,
    w: Array,
    b: Array | None,
    targets: Array,
    numbers: Array,
    losses: Array,
    *,
    back: bool,
    fixed: bool,
) -> Gradients | None:
    """Gradients with `back`, and losses: a share of the rows on each thread."""
    n, (_, n_classes) = len(x), w.shape
    table = np.array(map_of(LinearParams(w, b), *w.shape), np.int64)
    dx = np.empty_like(x) if back else x
    parts: dict[int, tuple[Array | None, Array | None]] = {}  # of dw and db, by their first row
    memory = np.empty_like if n else np.zeros_like  # where there is no row nothing is written

    def share(own: slice) -> None:
        dw = memory(w) if back and not fixed else None
        db = memory(b) if back and b is not None else None
        grads = np.array(maps.places(dw, db), np.int64)
        its = x[own], targets[own], losses[own], dx[own]
        logits = scratch("logits", (max(1, min(LOGITS // n_classes, n)), n_classes), np.float32)
        some_rows(products(), table, numbers, back, *its, grads, logits)
        parts[own.start] = dw, db

    size = max(1, -(-n // n_threads()))
    run([partial(share, slice(i, i + size)) for i in range(0, max(n, 1), size)])
    if not back:
        return None
    dw, db = (_sum(column) for column in zip(*(parts[i] for i in sorted(parts)), strict=True))
    return Gradients(dx, dw, db)


def _sum(parts: tuple[Array | None, ...]) -> Array | None:
    """In place of the first."""
    total = parts[0]
    for more in parts[1:]:
        total = None if total is None else np.add(total, more, out=total)  # type: ignore[arg-type]
    return total


@rowwise
def some_rows(
    by: Any,
    own: Any,
    numbers: Any,
    back: bool,
    x: Any,
    targets: Any,
    losses: Any,
    dx: Any,
    grads: Any,
    logits: Any,
) -> None:
    """losses (N,) of x (N, D), and back their gradients: dx, and where `grads` says dw and db."""
    b = maps.bias(own)
    for start in range(0, len(x), len(logits)):
        stop = min(start + len(logits), len(x))
        part, e = x[start:stop], logits[: stop - start]
        maps.multiply(by, part, own, e)
        if own[BIAS]:
            maps.add(e, b)
        differentiate_rows(e, targets[start:stop], numbers, losses[start:stop])
        if back:
            maps.multiply_backward(by, part, own, grads, e, False, dx[start:stop])
            grads[maps.MORE] = True


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
