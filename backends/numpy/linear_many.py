"""`linear_many`: the pieces of all maps are one job, so that threads synchronise once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numpy.linear import gradients, mapped
from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.layers.linear import LinearParams
from xformer.layers.linear import linear_many as reference
from xformer.showing import short
from xformer.typing import Array


def unsupported(x: Array, params: tuple[Any, ...], *, all_kept: bool = False) -> str | None:
    """Why the kernel cannot run."""
    for own in params:
        leaves = own if isinstance(own, LinearParams) else (own,)
        if not all(leaf is None or isinstance(leaf, np.ndarray) for leaf in leaves):
            return "adapters or frozen parameters"
    return None


@kernel(reference, "numpy", unsupported=unsupported)
def linear_many(
    x: Array, params: tuple[LinearParams, ...], *, all_kept: bool = False
) -> tuple[tuple[Array, ...], LinearsCache]:
    """Pieces of each y."""
    for w, b in params:
        ops.linear.reference.check((x, w, b), {})  # type: ignore[attr-defined]
    return tuple(mapped(x, params)), LinearsCache(x, params)


@short
class LinearsCache(NamedTuple):
    """Saved by `linear_many` for backward."""

    x: Array  # (..., I)
    params: tuple[LinearParams, ...]

    def backward(self, *dys: Array) -> tuple[Array, tuple[LinearParams, ...]]:
        """dx = sum dy w^T, dw = x^T dy, db = sum of dy over its rows: pieces of all at once."""
        for own, dy in zip(self.params, dys, strict=True):
            require_gradient("linear", "dy", dy, own.w, (*self.x.shape[:-1], own.w.shape[1]))
        dx, dparams = gradients(self.x, self.x.shape, self.params, dys)
        return dx, tuple(LinearParams(*own) for own in dparams)
