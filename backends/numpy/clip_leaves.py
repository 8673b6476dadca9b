"""Clip gradients by their global norm. Gradients that need no clipping are not copied."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xformer.backends.numpy.leaves import map_leaves, share_no_memory, unsupported_leaves
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.optim.clip import clip_leaves as reference


def unsupported(grads: Sequence[Array], *, max_norm: float, donate: bool = False) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return unsupported_leaves(grads)


@kernel(reference, "numpy", unsupported=unsupported)
def clip_leaves(
    grads: Sequence[Array], *, max_norm: float, donate: bool = False
) -> tuple[Sequence[Array], Array]:
    """Return the clipped gradients and their norm before clipping, from dot products of parts.

    The sums of squares are sorted before they are added, so the order of threads does not matter.
    """
    squares: list[float] = []
    map_leaves(lambda g: squares.append(float(np.dot(g, g))), grads)
    norm = grads[0].dtype.type(math.sqrt(sum(sorted(squares))))
    scale = np.minimum(max_norm / (norm + 1e-6), 1.0)
    if scale == 1:
        return grads, norm
    # If the norm is not finite, keep the gradients: they show which one is not finite.
    overwrite = donate and bool(np.isfinite(norm)) and share_no_memory(grads)
    (clipped,) = map_leaves(
        lambda g, out: np.multiply(g, scale, out=out), grads, replaced=(0,), donate=overwrite
    )
    return clipped, norm
