"""Cross-entropy of logits against class ids."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import (
    require_axis,
    require_gradient,
    require_in_range,
    require_integers,
    whole,
)
from xformer.dispatch.shapes import shapes
from xformer.ops._loss import loss_options, one


@overridable
@shapes("logits (..., V)  targets (...)")
def cross_entropy(
    logits: Array,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Array, CrossEntropyCache]:
    """loss = (1 - a) (lse - x[target]) + a (lse - mean(x)) + z lse^2 for each token.

    x are the logits of a token, lse = log(sum(exp(x))), a = label_smoothing (arXiv:1512.00567),
    z = z_loss (arXiv:2204.02311, section 5).

    logits: (..., V)   targets: (...) integers in [0, V)   loss: (), or (...) for reduction "none"
    ignore_index: tokens with this target have loss 0, and do not count in the mean.
    reduction: "mean" (0 if all tokens are ignored), "sum", or "none" for the loss of each token.

    ValueError for another shape, a target outside [0, V) or an option out of range; TypeError for
    another dtype. Derivation: docs/derivations/cross_entropy.md
    """
    ignore_index, label_smoothing, z_loss, reduction = loss_options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )
    require_axis("cross_entropy", logits, -1, "logits")
    xp = array_namespace(logits)
    targets, kept = split_ignored(logits, targets, ignore_index)
    x = logits if kept is None else _where_kept(kept, logits)
    top = xp.max(x, axis=-1, keepdims=True)  # (..., 1)
    shifted = x - top  # lse - x would lose log(sum) if top is large
    total = xp.sum(xp.exp(shifted), axis=-1, keepdims=True)  # (..., 1)
    hit = xp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]  # (...)
    loss = xp.log(total)[..., 0]  # (...), lse - top
    if label_smoothing < 1:  # 0 times a logit of -inf would be NaN
        loss = loss - (1 - label_smoothing) * hit
    if label_smoothing > 0:
        loss = loss - label_smoothing * xp.mean(shifted, axis=-1)
    if z_loss:
        loss = loss + z_loss * _lse(top, total)[..., 0] ** 2
    weight = xp.ones_like(loss) if kept is None else xp.astype(kept, loss.dtype)
    loss = loss * weight
    if reduction == "mean":
        weight = weight / xp.maximum(xp.sum(weight), 1.0)
    cache = CrossEntropyCache(
        logits, targets, kept, top, total, weight, label_smoothing, z_loss, reduction
    )
    if reduction == "none":
        return loss, cache
    return xp.sum(loss * weight), cache


@short
class CrossEntropyCache(NamedTuple):
    """Saved by `cross_entropy` for backward; probabilities are recomputed from top."""

    logits: Array  # (..., V)
    targets: Array  # (...), ignored ones set to 0
    kept: Array | None  # (...), boolean; None: no token is ignored
    top: Array  # (..., 1), max(x)
    total: Array  # (..., 1), sum(exp(x - top))
    weight: Array  # (...), 0 for ignored tokens
    label_smoothing: float
    z_loss: float
    reduction: str

    def backward(self, dloss: Array | None = None) -> Array:
        """dlogits = dloss * weight * (p (1 + 2 z lse) - (1 - a) onehot(target) - a / V).

        p = softmax(x) and lse = log(sum(exp(x))) of each token; a = label_smoothing, z = z_loss, V
        the number of classes. weight of a token: 0 if it is ignored; otherwise 1, and for reduction
        "mean" 1 / (the number of tokens that are not ignored).

        dloss: the gradient of the loss, (), or (...) for reduction "none"; None: 1, for reductions
            "mean" and "sum" only
        """
        dloss = one(self.logits) if dloss is None else dloss
        shape = self.targets.shape if self.reduction == "none" else ()
        require_gradient("cross_entropy", "dloss", dloss, self.logits, shape)
        xp = array_namespace(dloss)
        x = self.logits if self.kept is None else _where_kept(self.kept, self.logits)
        n_classes = x.shape[-1]
        classes = xp.arange(n_classes, dtype=self.targets.dtype, device=device(self.targets))
        onehot = xp.astype(classes == self.targets[..., None], dloss.dtype)  # (..., V)
        slope = (1 + 2 * self.z_loss * _lse(self.top, self.total)) / self.total
        dlogits = xp.exp(x - self.top) * slope
        dlogits = dlogits - (1 - self.label_smoothing) * onehot
        if self.label_smoothing:
            dlogits = dlogits - self.label_smoothing / n_classes
        return dlogits * (dloss * self.weight)[..., None]


def _lse(top: Array, total: Array) -> Array:
    return array_namespace(total).log(total) + top


def split_ignored(
    logits: Array, targets: Array, ignore_index: int | None, n_classes: int | None = None
) -> tuple[Array, Array | None]:
    """(targets, kept): targets with 0 for ignored tokens, and a mask of the others, or None.

    n_classes: V; None: the last axis of logits. Raises unless all other targets are in [0, V).
    """
    indices = require_integers("cross_entropy", "targets", targets, logits)
    xp, kept, ignored = array_namespace(indices), None, whole(ignore_index)
    wraps = ignored is not None and ignored < 0 and xp.isdtype(targets.dtype, "unsigned integer")
    if ignored is not None and not wraps:  # else large unsigned targets would count as ignored
        kept = indices != ignored
        indices = xp.where(kept, indices, 0)
    n_classes = logits.shape[-1] if n_classes is None else n_classes
    require_in_range("cross_entropy", "targets", indices, n_classes, ids=targets)
    return indices, kept


def _where_kept(kept: Array, logits: Array) -> Array:
    """The logits with zeros for ignored tokens, so that a NaN in them does not spread."""
    return array_namespace(logits).where(kept[..., None], logits, 0.0)
