"""The contrastive loss of pairs, with the other pairs of the batch as negatives."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import finite, require_axis, require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._loss import one


@overridable
@shapes("a (B, D)  b (B, D)")
def info_nce(a: Array, b: Array, *, scale: float = 20.0) -> tuple[Array, InfoNCECache]:
    """loss = mean over i of lse_i - logits_ii, logits = scale * a b^T (arXiv:1807.03748, eq. 4).

    lse_i is log(sum(exp)) of row i. The loss is the cross-entropy of finding the partner b_i of a_i
    among all rows of b: multiple negatives ranking (arXiv:1705.00652). For vectors of length 1, the
    products are cosines.

    a, b: (B, D), B at least 1   loss: ()
    scale: one over the temperature; it may be negative.

    ValueError if shapes differ, B is 0, or scale is not finite.
    Derivation: docs/derivations/info_nce.md
    """
    scale = finite("info_nce", "scale", scale)
    require_axis("info_nce", a, 0, "a")
    xp = array_namespace(a)
    logits = scale * (a @ b.T)  # (B, B)
    top = xp.max(logits, axis=-1, keepdims=True)  # (B, 1)
    shifted = logits - top  # lse - logits would lose log(sum) if top is large
    total = xp.sum(xp.exp(shifted), axis=-1, keepdims=True)  # (B, 1)
    hit = xp.sum(shifted * _eye(a), axis=-1)  # (B,); sum(a * b) would round differently from top
    return xp.mean(xp.log(total)[:, 0] - hit), InfoNCECache(a, b, top, total, scale)


@short
class InfoNCECache(NamedTuple):
    """Saved by `info_nce` for backward; probabilities are recomputed from top."""

    a: Array  # (B, D)
    b: Array  # (B, D)
    top: Array  # (B, 1), the highest logit of a row
    total: Array  # (B, 1), sum(exp(logits - top))
    scale: float

    def backward(self, dloss: Array | None = None) -> tuple[Array, Array]:
        """da = dscores b, db = dscores^T a, dscores = dloss * scale / B * (probs - identity)."""
        dloss = one(self.a) if dloss is None else dloss
        require_gradient("info_nce", "dloss", dloss, self.a, ())
        a, b, top, total, scale = self
        probs = array_namespace(dloss).exp(scale * (a @ b.T) - top) / total  # (B, B)
        dscores = (probs - _eye(a)) * (dloss * (scale / a.shape[0]))  # of a b^T
        return dscores @ b, dscores.T @ a


def _eye(a: Array) -> Array:
    return array_namespace(a).eye(a.shape[0], dtype=a.dtype, device=device(a))
