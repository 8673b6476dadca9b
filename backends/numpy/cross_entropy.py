"""`cross_entropy` in blocks of rows: no array of the logits' size but their gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
    tokens = Tokens.of(targets, logits.dtype, a, z)

    def piece(x: Array, at: slice) -> None:
        tokens.read(x, at, scratch("exp", x.shape, x.dtype))

    _over_rows(piece, logits, kept)
    loss, lse = tokens.losses(), tokens.lse
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
        dxs, targets, a = rows(dlogits), self.targets.reshape(-1), self.label_smoothing
        scale = dloss.reshape(-1) * self.weight  # (N,)
        dlse = scale * (1 + 2 * self.z_loss * self.lse)

        def piece(x: Array, at: slice) -> None:
            dx = dxs[at]
            np.exp(np.subtract(x, self.lse[at, None], out=dx), out=dx)
            dx *= dlse[at, None]
            less(dx, targets[at], scale[at], a)

        _over_rows(piece, self.logits, self.kept)
        return dlogits


class Tokens(NamedTuple):
    """Of each token what its loss needs of its logits."""

    targets: Array  # (N,)
    lse: Array  # (N,)
    hit: Array  # (N,), the target's logit
    mean: Array  # (N,), with label smoothing
    label_smoothing: float
    z_loss: float

    @staticmethod
    def of(targets: Array, dtype: Any, label_smoothing: float, z_loss: float) -> Tokens:
        """Nothing yet, of any token."""
        lse, hit, mean = (np.empty(targets.size, dtype) for _ in range(3))
        return Tokens(targets.reshape(-1), lse, hit, mean, label_smoothing, z_loss)

    def read(self, x: Array, at: slice, e: Array) -> Array:
        """These tokens' from their logits x; exp(x - max(x)) to e, which may be x; its sums."""
        top = np.maximum.reduce(x, axis=-1, keepdims=True)
        self.hit[at] = x[np.arange(len(x)), self.targets[at]]
        if self.label_smoothing:
            np.mean(x, axis=-1, out=self.mean[at])
        np.exp(np.subtract(x, top, out=e), out=e)
        total: Array = np.add.reduce(e, axis=-1)
        self.lse[at] = np.log(total) + top[:, 0]
        return total

    def losses(self) -> Array:
        """(N,)."""
        a, loss = self.label_smoothing, self.lse.copy()
        if a < 1:  # a factor of 0 would make NaN of a logit of -inf
            loss -= (1 - a) * self.hit
        if a:
            loss -= a * self.mean
        if self.z_loss:
            loss += self.z_loss * self.lse**2
        return loss


def less(dx: Array, targets: Array, scale: Any, label_smoothing: float) -> None:
    """dx -= scale * ((1 - a) onehot(target) + a / V), of each token."""
    dx[np.arange(len(dx)), targets] -= (1 - label_smoothing) * scale
    if label_smoothing:
        dx -= (label_smoothing / dx.shape[1] * scale)[:, None]


def _over_rows(piece: Callable[[Array, slice], None], logits: Array, kept: Array | None) -> None:
    """piece(logits, where) of each block of rows, with zeros for ignored tokens.

    What stands there, NaN perhaps, must not spread.
    """
    xs = rows(logits)
    keeps = None if kept is None else kept.reshape(-1, 1)

    def block(start: int, stop: int) -> None:
        at = slice(start, stop)
        x = xs[at]
        if keeps is not None and not keeps[at].all():
            x = np.where(keeps[at], x, 0)
        piece(x, at)

    row_blocks(block, *xs.shape)
