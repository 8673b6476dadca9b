"""Layer normalisation."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import number, require_axis, require_gradient
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (..., D)  w (D)  b (D)")
def layer_norm(
    x: Array, w: Array, b: Array | None = None, *, eps: float = 1e-5, eps_inside: bool = True
) -> tuple[Array, LayerNormCache]:
    """y = w * (x - mean) * rstd + b over the last axis (arXiv:1607.06450, eq. 4).

    rstd = 1 / sqrt(var + eps), with the biased variance.

    x: (..., D)   w: (D,)   b: (D,) or None   y: (..., D)
    eps_inside: if False, rstd = 1 / (sqrt(var) + eps).

    ValueError if shapes do not fit, D is 0 or eps negative.
    Derivation: docs/derivations/layer_norm.md
    """
    eps = number("layer_norm", "eps", eps, low=0)
    require_axis("layer_norm", x, -1)
    xp = array_namespace(x)
    mean = _mean(x)  # (..., 1)
    mean = mean + _mean(x - mean)  # corrects rounding: in a constant row x - mean is nothing else
    var = _mean((x - mean) ** 2)  # (..., 1); two passes, as E[x^2] - mean^2 would cancel
    rstd = 1 / xp.sqrt(var + eps) if eps_inside else 1 / (xp.sqrt(var) + eps)
    y = (x - mean) * rstd * w
    if b is not None:
        y = y + b
    return y, LayerNormCache(x, w, mean, rstd, 0.0 if eps_inside else eps, b is not None)


@short
class LayerNormCache(NamedTuple):
    """Saved by `layer_norm` for backward: x, w, and mean and rstd of each row, for xhat."""

    x: Array  # (..., D)
    w: Array  # (D,)
    mean: Array  # (..., 1)
    rstd: Array  # (..., 1)
    eps_outside: float  # eps if it is outside the root, else 0
    has_b: bool

    def backward(self, dy: Array) -> tuple[Array, Array, Array | None]:
        """dx = rstd * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)), dxhat = dy * w.

        dw = sum of dy * xhat, db = sum of dy, over the rows; db is None without b. If eps is
        outside the root, the last term is divided by 1 - eps * rstd = std / (std + eps).
        """
        require_gradient("layer_norm", "dy", dy, self.x)
        xp = array_namespace(dy)
        xhat = (self.x - self.mean) * self.rstd
        dxhat = dy * self.w
        slope = _mean(dxhat * xhat)  # (..., 1)
        if self.eps_outside:
            share = 1 - self.eps_outside * self.rstd  # 0 in a constant row; its xhat is 0 too
            slope = slope / xp.where(share > 0, share, 1.0)
        dx = self.rstd * (dxhat - _mean(dxhat) - xhat * slope)
        rows = tuple(range(dy.ndim - 1))
        dw = xp.sum(dy * xhat, axis=rows)
        db = xp.sum(dy, axis=rows) if self.has_b else None
        return dx, dw, db


def _mean(x: Array) -> Array:
    return array_namespace(x).mean(x, axis=-1, keepdims=True)
