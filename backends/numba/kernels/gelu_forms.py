"""Loops for `gelu` and its derivative: the exact form and the approximation by tanh.

Each loop reads an element once and computes the whole formula. Constants of the polynomials are
those of `backends.numpy.gelu`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends.numba.compiled import LOG2_E, elementwise, exp2
from xformer.backends.numpy.gelu import EXACT, TANH
from xformer.ops.gelu import CUBIC, FAR, SCALE

T0, T1 = map(np.float32, TANH)
E0, E1, E2, E3, E4, E5, E6 = map(np.float32, EXACT)
SLOPE0, SLOPE1 = np.float32(2 * SCALE), np.float32(6 * SCALE * CUBIC)
FAR32, DENSITY = np.float32(FAR), np.float32(1 / math.sqrt(2 * math.pi))
ONE, HALF = np.float32(1), np.float32(0.5)


@elementwise
def tanh_form(x: Any, y: Any) -> None:
    """Write y = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). x, y: (n,)."""
    for i in range(x.size):
        v = max(x[i], -FAR32)
        clipped = min(v, FAR32)
        y[i] = v / (ONE + exp2(clipped * (T0 + T1 * clipped * clipped)))


@elementwise
def tanh_gradient(x: Any, dy: Any, dx: Any) -> None:
    """Write dx = dy * Phi * (1 + (1 - Phi) x (2 u)'), Phi = sigmoid(2 u) with u of `tanh_form`.

    All arrays are (n,).
    """
    for i in range(x.size):
        v = min(max(x[i], -FAR32), FAR32)
        square = v * v
        phi = ONE / (ONE + exp2(v * (T0 + T1 * square)))
        dx[i] = dy[i] * phi * (ONE + (ONE - phi) * v * (SLOPE0 + SLOPE1 * square))


@elementwise
def exact_form(x: Any, y: Any) -> None:
    """Write y = x * Phi(x), Phi approximated by the sigmoid of an odd polynomial. x, y: (n,)."""
    for i in range(x.size):
        v = max(x[i], -FAR32)
        clipped = min(v, FAR32)
        s = clipped * clipped
        p = E0 + s * (E1 + s * (E2 + s * (E3 + s * (E4 + s * (E5 + s * E6)))))
        y[i] = v / (ONE + exp2(clipped * p))


@elementwise
def exact_gradient(x: Any, dy: Any, dx: Any) -> None:
    """Write dx = dy * (Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)). All arrays are (n,)."""
    for i in range(x.size):
        v = min(max(x[i], -FAR32), FAR32)
        s = v * v
        p = E0 + s * (E1 + s * (E2 + s * (E3 + s * (E4 + s * (E5 + s * E6)))))
        phi = ONE / (ONE + exp2(v * p))
        dx[i] = dy[i] * (phi + v * DENSITY * exp2(-HALF * LOG2_E * s))
