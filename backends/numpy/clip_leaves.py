"""Clipping: the norm by dot products of parts, and no copy where nothing is clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xformer.backends.numpy.leaves import apart, over, unlike
from xformer.dispatch import kernel
from xformer.optim.clip import clip_leaves as reference
from xformer.typing import Array


def unsupported(grads: Sequence[Array], *, max_norm: float, donate: bool = False) -> str | None:
    """All leaves must be as the first."""
    return unlike(grads)


@kernel(reference, "numpy", unsupported=unsupported)
def clip_leaves(
    grads: Sequence[Array], *, max_norm: float, donate: bool = False
) -> tuple[Sequence[Array], Array]:
    """Sorted, the squares of the parts have one sum, whichever thread was first."""
    squares: list[float] = []
    over(lambda g: squares.append(float(np.dot(g, g))), grads)
    norm = grads[0].dtype.type(math.sqrt(sum(sorted(squares))))
    scale = np.minimum(max_norm / (norm + 1e-6), 1.0)
    if scale == 1:
        return grads, norm
    # Of a norm that is not finite, nothing would tell which gradient was not.
    kept = donate and bool(np.isfinite(norm)) and apart(grads)
    (clipped,) = over(
        lambda g, out: np.multiply(g, scale, out=out), grads, replaced=(0,), donate=kept
    )
    return clipped, norm
