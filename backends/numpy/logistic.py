"""The sigmoids that gelu and silu are made of, in place: 1 / (1 + 2^(x P(x^2)))."""

from __future__ import annotations

import math

import numpy as np

from xformer.typing import Array

LOG2_E = math.log2(math.e)


def inverse_sigmoid(x: Array, p: tuple[float, ...], out: Array, square: Array | None) -> Array:
    """1 + 2^(x P(x^2)), P by Horner's rule; infinite where it overflows: the sigmoid is 0.

    square: x^2, wanted where P is no constant.
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


def within(x: Array, far: float) -> Array:
    """x, or x cut to [-far, far] where it goes beyond: infinity would make NaN."""
    if np.minimum.reduce(x) >= -far and np.maximum.reduce(x) <= far:
        return x
    return np.clip(x, -far, far)
