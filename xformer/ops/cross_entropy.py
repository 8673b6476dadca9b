"""Cross-entropy of logits against class ids."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace, device

from xformer.dispatch import overridable
from xformer.ops._checks import require_ids, require_integers
from xformer.shapes import shapes
from xformer.typing import Array


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

    x: its logits, lse = log(sum(exp(x))), a: label_smoothing (arXiv:1512.00567), z: z_loss
    (arXiv:2204.02311, section 5). Tokens whose target is `ignore_index` give 0; "mean" is over the
    others, and 0 where there are none; "none" keeps the tokens apart.

    logits: (..., V)   targets: (...) integers in [0, V)   loss: () or (...). ValueError, TypeError
    where they are not. Derivation: docs/derivations/cross_entropy.md
    """
    _require_options(label_smoothing, reduction)
    xp = array_namespace(logits)
    targets, kept = _split_ignored(logits, targets, ignore_index)
    top = xp.max(logits, axis=-1, keepdims=True)
    lse = xp.log(xp.sum(xp.exp(logits - top), axis=-1)) + top[..., 0]  # (...)
    hit = xp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]  # (...)
    loss = lse - hit
    if label_smoothing:
        loss = loss + label_smoothing * (hit - xp.mean(logits, axis=-1))
    if z_loss:
        loss = loss + z_loss * lse**2
    loss = xp.where(kept, loss, 0.0)
    weight = xp.astype(kept, logits.dtype)  # d total / d loss of each token
    if reduction == "mean":
        weight = weight / xp.maximum(xp.sum(weight), 1.0)
    cache = CrossEntropyCache(logits, targets, lse, weight, label_smoothing, z_loss, reduction)
    if reduction == "none":
        return loss, cache
    return xp.sum(loss * weight), cache


class CrossEntropyCache(NamedTuple):
    """What `cross_entropy` keeps for its backward; probabilities are recomputed from lse."""

    logits: Array  # (..., V)
    targets: Array  # (...), ignored ones set to 0
    lse: Array  # (...)
    weight: Array  # (...), 0 for ignored tokens
    label_smoothing: float
    z_loss: float
    reduction: str

    def backward(self, dloss: Array) -> Array:
        """dlogits = dloss * weight * (p (1 + 2 z lse) - (1 - a) onehot(target) - a / V)."""
        xp = array_namespace(dloss)
        n_classes = self.logits.shape[-1]
        lse = self.lse[..., None]
        classes = xp.arange(n_classes, dtype=self.targets.dtype, device=device(self.targets))
        onehot = xp.astype(classes == self.targets[..., None], dloss.dtype)  # (..., V)
        dlogits = xp.exp(self.logits - lse) * (1 + 2 * self.z_loss * lse)
        dlogits = dlogits - (1 - self.label_smoothing) * onehot
        if self.label_smoothing:
            dlogits = dlogits - self.label_smoothing / n_classes
        return dlogits * (dloss * self.weight)[..., None]


def _split_ignored(logits: Array, targets: Array, ignore_index: int | None) -> tuple[Array, Array]:
    """Targets with 0 in place of ignored ones, and which are kept. Checks the rest."""
    require_integers("cross_entropy", "targets", targets, logits)
    xp = array_namespace(targets)
    if ignore_index is None:
        kept = xp.ones_like(targets, dtype=xp.bool)
    else:
        kept = targets != ignore_index
        targets = xp.where(kept, targets, 0)
    require_ids("cross_entropy", "targets", targets, logits.shape[-1], logits)
    return targets, kept


def _require_options(label_smoothing: float, reduction: str) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"cross_entropy: label_smoothing must lie in [0, 1], got {label_smoothing}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f'cross_entropy: reduction must be "mean", "sum" or "none", got {reduction!r}'
        )
