"""`gelu`, each element once through all of its formula."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.compiled import BLOCK, LOG2_E, elementwise, exp2
from xformer.backends.numpy.gelu import EXACT, TANH
from xformer.backends.numpy.rows import flat
from xformer.backends.numpy.threads import blocks

from xformer.checks import require_gradient
from xformer.ops.gelu import CUBIC, FAR, SCALE
from xformer.typing import Array

T0, T1 = map(np.float32, TANH)
E0, E1, E2, E3, E4, E5, E6 = map(np.float32, EXACT)
SLOPE0, SLOPE1 = np.float32(2 * SCALE), np.float32(6 * SCALE * CUBIC)
FAR32, DENSITY = np.float32(FAR), np.float32(1 / math.sqrt(2 * math.pi))
ONE, HALF = np.float32(1), np.float32(0.5)


def not_float32(x: Array, *, approximate: str = "none") -> str | None:
    """Why the kernel cannot run."""
    if x.dtype != np.float32 or approximate not in ("none", "tanh"):
        return "only float32, and the forms none and tanh"
    return None


def gelu(x: Array, *, approximate: str = "none") -> tuple[Array, GeluCache]:
    """y = x * Phi(x)."""
    y, xs = np.empty(x.shape, x.dtype), flat(x)
    ys, forward = y.reshape(-1), tanh_form if approximate == "tanh" else exact_form
    blocks(lambda a, b: forward(xs[a:b], ys[a:b]), xs.size, BLOCK)
    return y, GeluCache(x, approximate)


class GeluCache(NamedTuple):
    """What `gelu` keeps for its backward."""

    x: Array
    approximate: str

    def backward(self, dy: Array) -> Array:
        """dx = dy * (Phi + x * Phi')."""
        require_gradient("gelu", "dy", dy, self.x)
        dx = np.empty(dy.shape, dy.dtype)
        xs, dys, dxs = flat(self.x), flat(dy), dx.reshape(-1)
        backward = tanh_slope if self.approximate == "tanh" else exact_slope
        blocks(lambda a, b: backward(xs[a:b], dys[a:b], dxs[a:b]), xs.size, BLOCK)
        return dx


@elementwise
def tanh_form(x: Any, y: Any) -> None:
    for i in range(x.size):
        v = max(x[i], -FAR32)
        n = min(v, FAR32)
        y[i] = v / (ONE + exp2(n * (T0 + T1 * n * n)))


@elementwise
def tanh_slope(x: Any, dy: Any, dx: Any) -> None:
    """Phi * (1 + (1 - Phi) x u'), as in `backends.numpy.gelu`."""
    for i in range(x.size):
        v = min(max(x[i], -FAR32), FAR32)
        square = v * v
        phi = ONE / (ONE + exp2(v * (T0 + T1 * square)))
        dx[i] = dy[i] * phi * (ONE + (ONE - phi) * v * (SLOPE0 + SLOPE1 * square))


@elementwise
def exact_form(x: Any, y: Any) -> None:
    for i in range(x.size):
        v = max(x[i], -FAR32)
        n = min(v, FAR32)
        s = n * n
        p = E0 + s * (E1 + s * (E2 + s * (E3 + s * (E4 + s * (E5 + s * E6)))))
        y[i] = v / (ONE + exp2(n * p))


@elementwise
def exact_slope(x: Any, dy: Any, dx: Any) -> None:
    """Phi + x exp(-x^2 / 2) / sqrt(2 pi)."""
    for i in range(x.size):
        v = min(max(x[i], -FAR32), FAR32)
        s = v * v
        p = E0 + s * (E1 + s * (E2 + s * (E3 + s * (E4 + s * (E5 + s * E6)))))
        phi = ONE / (ONE + exp2(v * p))
        dx[i] = dy[i] * (phi + v * DENSITY * exp2(-HALF * LOG2_E * s))
