"""`cross_entropy` in blocks of rows. Only the gradient is an array of the logits' size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numpy.ids import private_copy
from xformer.backends.numpy.rows import row_blocks, rows
from xformer.backends.numpy.threads import scratch
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_axis, require_gradient
from xformer.ops._loss import loss_options, one
from xformer.ops.cross_entropy import cross_entropy as reference
from xformer.ops.cross_entropy import split_ignored


@kernel(reference, "numpy")
def cross_entropy(
    logits: Array,
    *,
    targets: Array,
    **options: Any,
) -> tuple[Array, NumpyCrossEntropyCache]:
    """Compute the loss from each row's maximum, sum of exponentials and target logit."""
    ignore_index, a, z, reduction = loss_options(**options)
    require_axis("cross_entropy", logits, -1, "logits")
    targets, keep = split_ignored(logits, private_copy(targets), ignore_index)
    tokens = Tokens.empty(targets, logits.dtype, a, z)

    def piece(x: Array, span: slice) -> None:
        tokens.read(x, span, scratch("exp", x.shape, x.dtype))

    _over_rows(piece, logits, keep)
    loss = tokens.losses()
    weight = np.ones_like(loss) if keep is None else keep.reshape(-1).astype(loss.dtype)
    loss *= weight
    if reduction == "mean":
        weight /= max(np.add.reduce(weight), 1)
    cache = NumpyCrossEntropyCache(
        logits, targets, keep, tokens.top, tokens.total, weight, a, z, reduction
    )
    if reduction == "none":
        return loss.reshape(targets.shape), cache
    return np.add.reduce(loss * weight), cache


@short
class NumpyCrossEntropyCache(NamedTuple):
    """Saved by `cross_entropy` for backward; probabilities are exp(logits - top) / total."""

    logits: Array  # (..., V)
    targets: Array  # (...), ignored ones set to 0
    keep: Array | None  # (...), boolean: the target is not ignored; None if no target is ignored
    top: Array  # (N,), max(x)
    total: Array  # (N,), sum(exp(x - top))
    weight: Array  # (N,), the factor of a token's loss, 0 for ignored tokens
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
        factor = scale * exp_factor(self.top, self.total, self.z_loss)

        def piece(x: Array, span: slice) -> None:
            dx = dxs[span]
            np.exp(np.subtract(x, self.top[span, None], out=dx), out=dx)
            dx *= factor[span, None]
            subtract_targets(dx, targets[span], scale[span], a)

        _over_rows(piece, self.logits, self.keep)
        return dlogits


class Tokens(NamedTuple):
    """What the loss and its gradient need of each token's logits. `read` fills it in."""

    targets: Array  # (N,), ignored ones set to 0
    top: Array  # (N,), max(x)
    total: Array  # (N,), sum(exp(x - top))
    hit: Array  # (N,), x[target] - top
    mean: Array  # (N,), mean(x - top); only with label smoothing
    label_smoothing: float
    z_loss: float

    @staticmethod
    def empty(targets: Array, dtype: Any, label_smoothing: float, z_loss: float) -> Tokens:
        """Return uninitialised arrays for all `targets`."""
        top, total, hit, mean = (np.empty(targets.size, dtype) for _ in range(4))
        return Tokens(targets.reshape(-1), top, total, hit, mean, label_smoothing, z_loss)

    def read(self, x: Array, span: slice, e: Array) -> None:
        """Fill in the tokens `span` from their logits x (n, V), and write exp(x - top) to e.

        e may be x itself.
        """
        top = np.maximum.reduce(x, axis=-1, out=self.top[span])
        np.subtract(x, top[:, None], out=e)
        self.hit[span] = e[np.arange(len(e)), self.targets[span]]
        if self.label_smoothing:
            np.mean(e, axis=-1, out=self.mean[span])
        np.exp(e, out=e)
        np.add.reduce(e, axis=-1, out=self.total[span])

    def losses(self) -> Array:
        """Return the loss of each token, (N,)."""
        a, loss = self.label_smoothing, np.log(self.total)  # lse - top
        if a < 1:  # a factor of 0 would make NaN of a logit of -inf
            loss -= (1 - a) * self.hit
        if a:
            loss -= a * self.mean
        if self.z_loss:
            loss += self.z_loss * (np.log(self.total) + self.top) ** 2
        return loss


def exp_factor(top: Array, total: Array, z_loss: float) -> Array:
    """Return (N,): times exp(x - top) it is the gradient of lse + z lse^2, lse = logsumexp(x)."""
    return (1 + 2 * z_loss * (np.log(total) + top)) / total


def subtract_targets(dx: Array, targets: Array, scale: Any, label_smoothing: float) -> None:
    """Subtract scale * ((1 - a) onehot(target) + a / V) from dx (n, V); a is label_smoothing."""
    dx[np.arange(len(dx)), targets] -= (1 - label_smoothing) * scale
    if label_smoothing:
        dx -= (label_smoothing / dx.shape[1] * scale)[:, None]


def _over_rows(piece: Callable[[Array, slice], None], logits: Array, keep: Array | None) -> None:
    """Call piece(x, span) for each block of rows: x are the logits (n, V) of the rows `span`.

    The logits of ignored tokens are set to 0, since they may be NaN.
    """
    xs = rows(logits)
    keep_column = None if keep is None else keep.reshape(-1, 1)

    def block(start: int, stop: int) -> None:
        span = slice(start, stop)
        x = xs[span]
        if keep_column is not None and not keep_column[span].all():
            x = np.where(keep_column[span], x, 0)
        piece(x, span)

    row_blocks(block, *xs.shape)
