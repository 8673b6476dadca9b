"""`gelu` block by block: all operations on a block run while it is in a core's cache.

Both forms are computed as x / (1 + 2^(x P(x^2))) with a polynomial P. The tanh form has exactly
this form, and P has two terms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from xformer.backends.numpy.logistic import LOG2_E, clipped, inverse_sigmoid
from xformer.backends.numpy.rows import BLOCK, flat
from xformer.backends.numpy.threads import blocks, scratch
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.ops.gelu import CUBIC, FAR, SCALE
from xformer.ops.gelu import gelu as reference

TANH = (-2 * SCALE * LOG2_E, -2 * SCALE * LOG2_E * CUBIC)
# P for -log2(Phi(x) / Phi(-x)) / x, fitted for |x| < 6.6. The error of x Phi(x) is at most 7e-8.
# For larger |x|, Phi is 0 or 1 to rounding, with this P too.
EXACT = (
    -2.3022072035797034,
    -0.10483858130837506,
    9.559297734205085e-05,
    0.00015938939864301727,
    -1.1452428132162062e-05,
    3.8504488771266446e-07,
    -5.209906373832028e-09,
)


def unsupported(x: Array, *, approximate: str = "none") -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    if approximate == "tanh" or (approximate == "none" and x.dtype == np.float32):
        return None
    return "only float32 or the tanh form"


@kernel(reference, "numpy", unsupported=unsupported)
def gelu(x: Array, *, approximate: str = "none") -> tuple[Array, NumpyGeluCache]:
    """y = x * Phi(x), without the reference's temporary arrays of x's size."""
    p = TANH if approximate == "tanh" else EXACT
    y = np.empty(x.shape, x.dtype)
    xs, ys = flat(x), flat(y)

    def piece(start: int, stop: int) -> None:
        x, y = xs[start:stop], ys[start:stop]
        near = clipped(x, FAR)
        inverse_sigmoid(near, p, y, _square(near))
        np.divide(x if near is x else np.maximum(x, -FAR), y, out=y)  # 0 at -inf

    with np.errstate(over="ignore"):  # exp2 overflows if Phi is 0
        blocks(piece, xs.size, BLOCK)
    return y, NumpyGeluCache(x, approximate)


@short
class NumpyGeluCache(NamedTuple):
    """Saved by `gelu` for backward: x. Phi is recomputed from it."""

    x: Array  # (...)
    approximate: str  # "none" or "tanh"

    def backward(self, dy: Array) -> Array:
        """dx = dy * (Phi + x * Phi')."""
        require_gradient("gelu", "dy", dy, self.x)
        dx = np.empty(dy.shape, dy.dtype)
        xs, dys, dxs = flat(self.x), flat(dy), flat(dx)
        derivative = _tanh_derivative if self.approximate == "tanh" else _exact_derivative

        def piece(start: int, stop: int) -> None:
            dx = dxs[start:stop]
            derivative(clipped(xs[start:stop], FAR), out=dx)
            dx *= dys[start:stop]

        with np.errstate(over="ignore"):
            blocks(piece, dxs.size, BLOCK)
        return dx


def _tanh_derivative(x: Array, out: Array) -> None:
    """Write Phi * (1 + (1 - Phi) x u') to `out`.

    u = log(Phi / (1 - Phi)) = 2 SCALE (x + CUBIC x^3).
    """
    square = _square(x)
    phi = inverse_sigmoid(x, TANH, scratch("phi", x.shape, x.dtype), square)
    np.reciprocal(phi, out=phi)
    square *= 6 * SCALE * CUBIC
    square += 2 * SCALE
    square *= x
    np.subtract(1, phi, out=out)
    out *= square
    out += 1
    out *= phi


def _exact_derivative(x: Array, out: Array) -> None:
    """Write Phi + x exp(-x^2 / 2) / sqrt(2 pi) to `out`."""
    square = _square(x)
    phi = inverse_sigmoid(x, EXACT, scratch("phi", x.shape, x.dtype), square)
    np.reciprocal(phi, out=phi)
    np.multiply(square, -LOG2_E / 2, out=out)
    np.exp2(out, out=out)
    out *= x
    out *= 1 / math.sqrt(2 * math.pi)
    out += phi


def _square(x: Array) -> Array:
    return np.multiply(x, x, out=scratch("square", x.shape, x.dtype))
