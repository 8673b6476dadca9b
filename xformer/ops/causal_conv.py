"""A causal convolution over time, of each channel alone."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (B, T, C)  w (L, C)  before (B, N, C)")
def causal_conv(x: Array, w: Array, before: Array | None = None) -> tuple[Array, CausalConvCache]:
    """y_t = sum_j w_j * z_{t+j}, z = concat(before, x) (as in arXiv:2312.00752).

    Channels are not mixed (a depthwise convolution). The last row of w is for x_t itself, the first
    one for x_{t-L+1}.

    x, y: (B, T, C)   w: (L, C), L >= 1
    before: (B, L-1, C), the inputs at the L - 1 steps before x; None: zeros

    ValueError if shapes do not fit. Derivation: docs/derivations/causal_conv.md
    """
    n_before = w.shape[0] - 1
    if n_before < 0:
        raise ValueError(f"causal_conv: w must be (L, C) with L >= 1, got shape {tuple(w.shape)}")
    if before is not None and before.shape[1] != n_before:
        raise ValueError(
            f"causal_conv: before must be (B, L-1, C) with L - 1 = {n_before} (from w), "
            f"got shape {tuple(before.shape)}"
        )
    z = joined(before, x, n_before)
    y = z[:, n_before:, :] * w[n_before, :]
    for j in range(n_before):
        y = y + z[:, j : j + x.shape[1], :] * w[j, :]
    return y, CausalConvCache(x, w, before)


@short
class CausalConvCache(NamedTuple):
    """Saved by `causal_conv` for backward: its inputs. The derivative by each is the other."""

    x: Array  # (B, T, C)
    w: Array  # (L, C)
    before: Array | None  # (B, L-1, C)

    def backward(self, dy: Array) -> tuple[Array, Array, Array | None]:
        """dz_s = sum_j w_j * dy_{s-j}, dw_j = sum of dy_t * z_{t+j} over batch and time.

        dx is the part of dz that belongs to x, dbefore the other part; None without before.
        """
        require_gradient("causal_conv", "dy", dy, self.x)
        x, w, before = self
        xp = array_namespace(dy)
        n_steps, n_before = x.shape[1], w.shape[0] - 1
        z = joined(before, x, n_before)
        rows = [xp.sum(dy * z[:, j : j + n_steps, :], axis=(0, 1)) for j in range(n_before + 1)]
        zeros = xp.zeros((x.shape[0], n_before, x.shape[2]), dtype=x.dtype, device=device(x))
        padded = xp.concat([zeros, dy, zeros], axis=1)  # (B, T + 2L - 2, C)
        dz = padded[:, n_before:, :] * w[0, :]
        for j in range(1, n_before + 1):
            start = n_before - j
            dz = dz + padded[:, start : start + n_steps + n_before, :] * w[j, :]
        dbefore = None if before is None else dz[:, :n_before, :]
        return dz[:, n_before:, :], xp.stack(rows), dbefore


def joined(before: Array | None, x: Array, n: int) -> Array:
    """(B, n + T, C): x after `before`, or after n zeros."""
    xp = array_namespace(x)
    if before is None:
        before = xp.zeros((x.shape[0], n, x.shape[2]), dtype=x.dtype, device=device(x))
    return xp.concat([before, x], axis=1)
