"""`cross_entropy` in blocks of rows: no array of the logits' size but their gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numpy.ids import private
from xformer.backends.numpy.rows import row_blocks, rows
from xformer.backends.numpy.threads import scratch
from xformer.checks import finite, number, require_axis, require_gradient
from xformer.dispatch import kernel
from xformer.ops._loss import one
from xformer.ops.cross_entropy import cross_entropy as reference
from xformer.ops.cross_entropy import require_options, split_ignored
from xformer.showing import short
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
    """Of each row top, total, the target's logit and, with label smoothing, the mean."""
    a = number("cross_entropy", "label_smoothing", label_smoothing, low=0, high=1)
    z = finite("cross_entropy", "z_loss", z_loss)
    require_options(ignore_index, reduction)
    require_axis("cross_entropy", logits, -1, "logits")
    targets, kept = split_ignored(logits, private(targets), ignore_index)
    tokens = Tokens.of(targets, logits.dtype, a, z)

    def piece(x: Array, at: slice) -> None:
        tokens.read(x, at, scratch("exp", x.shape, x.dtype))

    _over_rows(piece, logits, kept)
    loss = tokens.losses()
    weight = np.ones_like(loss) if kept is None else kept.reshape(-1).astype(loss.dtype)
    loss *= weight
    if reduction == "mean":
        weight /= max(np.add.reduce(weight), 1)
    cache = CrossEntropyCache(
        logits, targets, kept, tokens.top, tokens.total, weight, a, z, reduction
    )
    if reduction == "none":
        return loss.reshape(targets.shape), cache
    return np.add.reduce(loss * weight), cache


@short
class CrossEntropyCache(NamedTuple):
    """Saved by `cross_entropy` for backward; probabilities are recomputed from top."""

    logits: Array  # (..., V)
    targets: Array  # (...), ignored ones set to 0
    kept: Array | None  # (...), boolean; None where all are
    top: Array  # (N,), max(x)
    total: Array  # (N,), sum(exp(x - top))
    weight: Array  # (N,), 0 for ignored tokens
    label_smoothing: float
    z_loss: float
    reduction: str

    def backward(self, dloss: Array | None = None) -> Array:
        """dlogits = dloss * weight * (p (1 + 2 z lse) - (1 - a) onehot(target) - a / V)."""
        dloss = one(self.logits) if dloss is None else dloss
        shape = self.targets.shape if self.reduction == "none" else ()
        require_gradient("cross_entropy", "dloss", dloss, self.logits, shape)
        dlogits = np.empty(self.logits.shape, dloss.dtype)
        dxs, targets, a = rows(dlogits), self.targets.reshape(-1), self.label_smoothing
        scale = dloss.reshape(-1) * self.weight  # (N,)
        slope = scale * slopes(self.top, self.total, self.z_loss)

        def piece(x: Array, at: slice) -> None:
            dx = dxs[at]
            np.exp(np.subtract(x, self.top[at, None], out=dx), out=dx)
            dx *= slope[at, None]
            less(dx, targets[at], scale[at], a)

        _over_rows(piece, self.logits, self.kept)
        return dlogits


class Tokens(NamedTuple):
    """Of each token what its loss needs of its logits."""

    targets: Array  # (N,), ignored ones set to 0
    top: Array  # (N,), the highest logit
    total: Array  # (N,), the sum of exp(x - top)
    hit: Array  # (N,), the target's logit less top
    mean: Array  # (N,), of the logits less top; with label smoothing
    label_smoothing: float
    z_loss: float

    @staticmethod
    def of(targets: Array, dtype: Any, label_smoothing: float, z_loss: float) -> Tokens:
        """Nothing yet, of any token."""
        top, total, hit, mean = (np.empty(targets.size, dtype) for _ in range(4))
        return Tokens(targets.reshape(-1), top, total, hit, mean, label_smoothing, z_loss)

    def read(self, x: Array, at: slice, e: Array) -> None:
        """These tokens' from their logits x; exp(x - top) to e, which may be x."""
        top = np.maximum.reduce(x, axis=-1, out=self.top[at])
        np.subtract(x, top[:, None], out=e)
        self.hit[at] = e[np.arange(len(e)), self.targets[at]]
        if self.label_smoothing:
            np.mean(e, axis=-1, out=self.mean[at])
        np.exp(e, out=e)
        np.add.reduce(e, axis=-1, out=self.total[at])

    def losses(self) -> Array:
        """(N,)."""
        a, loss = self.label_smoothing, np.log(self.total)  # lse - top
        if a < 1:  # a factor of 0 would make NaN of a logit of -inf
            loss -= (1 - a) * self.hit
        if a:
            loss -= a * self.mean
        if self.z_loss:
            loss += self.z_loss * (np.log(self.total) + self.top) ** 2
        return loss


def slopes(top: Array, total: Array, z_loss: float) -> Array:
    """(N,), what exp(x - top) is multiplied by for the gradient of lse + z lse^2."""
    return (1 + 2 * z_loss * (np.log(total) + top)) / total


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
