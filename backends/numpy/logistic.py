"""The sigmoid of gelu and silu, in place: 1 / (1 + 2^(x P(x^2))) with a polynomial P."""

from __future__ import annotations

import math

import numpy as np

from xformer.base.typing import Array

LOG2_E = math.log2(math.e)


def inverse_sigmoid(x: Array, p: tuple[float, ...], out: Array, square: Array | None) -> Array:
    """Write 1 + 2^(x P(x^2)) to `out` and return it. It is inf if it overflows: the sigmoid is 0.

    p: coefficients of P, the constant first; P is computed by Horner's rule.
    square: x^2; None if P is constant.
    """
    np.multiply(x if square is None else square, p[-1], out=out)
    for c in p[-2:0:-1]:
        out += c
        out *= square
    if square is not None:
        out += p[0]
        out *= x
    np.exp2(out, out=out)
    out += 1
    return out


def clipped(x: Array, far: float) -> Array:
    """Return x if it is within [-far, far], else a clipped copy: infinity would become NaN."""
    if np.minimum.reduce(x) >= -far and np.maximum.reduce(x) <= far:
        return x
    return np.clip(x, -far, far)
