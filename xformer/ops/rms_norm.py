"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import number, require_axis, require_gradient
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (..., D)  w (D)")
def rms_norm(
    x: Array, w: Array | None = None, *, eps: float = 1e-5, offset: float = 0.0
) -> tuple[Array, RmsNormCache]:
    """y = (offset + w) * x / sqrt(mean(x^2) + eps) over the last axis (arXiv:1910.07467, eq. 4).

    x: (..., D)   w: (D,), or None for no gain   y: (..., D)
    offset: 0 in Llama and T5, 1 in Gemma.

    ValueError if shapes do not fit, D is 0, eps is negative, or offset is not 0 without w.
    Derivation: docs/derivations/rms_norm.md
    """
    eps = number("rms_norm", "eps", eps, low=0)
    offset = number("rms_norm", "offset", offset)
    if w is None and offset != 0:
        raise ValueError(f"rms_norm: offset must be 0 where there is no w, got {offset}")
    require_axis("rms_norm", x, -1)
    rstd = 1 / array_namespace(x).sqrt(_mean(x**2) + eps)  # (..., 1)
    y = x * rstd
    if w is not None:
        y = y * (w + offset)
    return y, RmsNormCache(x, w, rstd, offset)


@short
class RmsNormCache(NamedTuple):
    """Saved by `rms_norm` for backward: x, w and 1 / RMS of each row, which give xhat again."""

    x: Array  # (..., D)
    w: Array | None  # (D,)
    rstd: Array  # (..., 1)
    offset: float

    def backward(self, dy: Array) -> tuple[Array, Array | None]:
        """dx = rstd * (dxhat - xhat * mean(dxhat * xhat)), dxhat = dy * (offset + w).

        xhat = x * rstd, means over the last axis. dw = sum of dy * xhat over the rows; None without
        w, and then dxhat = dy.
        """
        require_gradient("rms_norm", "dy", dy, self.x)
        xhat = self.x * self.rstd
        dw, dxhat = None, dy
        if self.w is not None:
            dw = array_namespace(dy).sum(dy * xhat, axis=tuple(range(dy.ndim - 1)))
            dxhat = dy * (self.w + self.offset)
        dx = self.rstd * (dxhat - xhat * _mean(dxhat * xhat))
        return dx, dw


def _mean(x: Array) -> Array:
    return array_namespace(x).mean(x, axis=-1, keepdims=True)
