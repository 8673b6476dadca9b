"""`cross_entropy` in blocks of rows: no array of the logits' size but their gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from xformer.backends.numpy.rows import row_blocks, rows
from xformer.backends.numpy.threads import scratch

from xformer.checks import number, require_axis, require_gradient
from xformer.dispatch import kernel
from xformer.ops.cross_entropy import cross_entropy as reference
from xformer.ops.cross_entropy import require_options, split_ignored
from xformer.typing import Array


@kernel(reference, "numpy")
def cross_entropy(
    logits: Array,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Array, CrossEntropyCache]:
    """Of each row lse, the target's logit and, with label smoothing, the mean."""
    a = number("cross_entropy", "label_smoothing", label_smoothing, low=0, high=1)
    z = number("cross_entropy", "z_loss", z_loss)
    require_options(ignore_index, reduction)
    require_axis("cross_entropy", logits, -1, "logits")
    targets, kept = split_ignored(logits, targets, ignore_index)
    lse, hit, mean = (np.empty(targets.size, logits.dtype) for _ in range(3))

    def piece(x: Array, targets: Array, at: slice) -> None:
        e = scratch("exp", x.shape, x.dtype)
        top = np.maximum.reduce(x, axis=-1, keepdims=True)
        np.exp(np.subtract(x, top, out=e), out=e)
        lse[at] = np.log(np.add.reduce(e, axis=-1)) + top[:, 0]
        hit[at] = x[np.arange(len(x)), targets]
        if a:
            np.mean(x, axis=-1, out=mean[at])

    _over_rows(piece, logits, targets, kept)
    loss = lse.copy()
    if a < 1:  # a factor of 0 would make NaN of a logit of -inf
        loss -= (1 - a) * hit
    if a:
        loss -= a * mean
    if z:
        loss += z * lse**2
    weight = np.ones_like(lse) if kept is None else kept.reshape(-1).astype(lse.dtype)
    loss *= weight
    if reduction == "mean":
        weight /= max(np.add.reduce(weight), 1)
    cache = CrossEntropyCache(logits, targets, kept, lse, weight, a, z, reduction)
    if reduction == "none":
        return loss.reshape(targets.shape), cache
    return np.add.reduce(loss * weight), cache


class CrossEntropyCache(NamedTuple):
    """What `cross_entropy` keeps for its backward; probabilities are recomputed from lse."""

    logits: Array  # (..., V)
    targets: Array  # (...), ignored ones set to 0
    kept: Array | None  # (...), boolean; None where all are
    lse: Array  # (N,)
    weight: Array  # (N,), 0 for ignored tokens
    label_smoothing: float
    z_loss: float
    reduction: str

    def backward(self, dloss: Array) -> Array:
        """dlogits = dloss * weight * (p (1 + 2 z lse) - (1 - a) onehot(target) - a / V)."""
        shape = self.targets.shape if self.reduction == "none" else ()
        require_gradient("cross_entropy", "dloss", dloss, self.logits, shape)
        dlogits = np.empty(self.logits.shape, dloss.dtype)
        dxs, a = rows(dlogits), self.label_smoothing
        scale = dloss.reshape(-1) * self.weight  # (N,)
        dlse = scale * (1 + 2 * self.z_loss * self.lse)

        def piece(x: Array, targets: Array, at: slice) -> None:
            dx = dxs[at]
            np.exp(np.subtract(x, self.lse[at, None], out=dx), out=dx)
            dx *= dlse[at, None]
            dx[np.arange(len(x)), targets] -= (1 - a) * scale[at]
            if a:
                dx -= a / x.shape[1] * scale[at, None]

        _over_rows(piece, self.logits, self.targets, self.kept)
        return dlogits


def _over_rows(
    piece: Callable[[Array, Array, slice], None], logits: Array, targets: Array, kept: Array | None
) -> None:
    """piece(logits, targets, where) of each block of rows, with zeros for ignored tokens.

    What stands there, NaN perhaps, must not spread.
    """
    xs, targets = rows(logits), targets.reshape(-1)
    keeps = None if kept is None else kept.reshape(-1, 1)

    def block(start: int, stop: int) -> None:
        at = slice(start, stop)
        x = xs[at]
        if keeps is not None and not keeps[at].all():
            x = np.where(keeps[at], x, 0)
        piece(x, targets[at], at)

    row_blocks(block, *xs.shape)
