"""`linear_many` whose products are all computed in one job, so that threads synchronise once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numpy.linear import gradients, outputs
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.layers.linear import LinearParams
from xformer.layers.linear import linear_many as reference


def unsupported(x: Array, params: tuple[Any, ...], *, all_kept: bool = False) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    for p in params:
        leaves = p if isinstance(p, LinearParams) else (p,)
        if not all(leaf is None or isinstance(leaf, np.ndarray) for leaf in leaves):
            return "adapters or frozen parameters"
    return None


@kernel(reference, "numpy", unsupported=unsupported)
def linear_many(
    x: Array, params: tuple[LinearParams, ...], *, all_kept: bool = False
) -> tuple[tuple[Array, ...], NumpyLinearsCache]:
    """Return x w + b for each of `params`."""
    for w, b in params:
        ops.linear.reference.check((x, w, b), {})  # type: ignore[attr-defined]
    return tuple(outputs(x, params)), NumpyLinearsCache(x, params)


@short
class NumpyLinearsCache(NamedTuple):
    """Saved by `linear_many` for backward: x for each dw, and the weights for dx."""

    x: Array  # (..., I)
    params: tuple[LinearParams, ...]

    def backward(self, *dys: Array) -> tuple[Array, tuple[LinearParams, ...]]:
        """Return dx = sum dy w^T, and for each map dw = x^T dy and db = sum of the rows of dy."""
        for p, dy in zip(self.params, dys, strict=True):
            require_gradient("linear", "dy", dy, p.w, (*self.x.shape[:-1], p.w.shape[1]))
        dx, dparams = gradients(self.x, self.x.shape, self.params, dys)
        return dx, tuple(LinearParams(*p) for p in dparams)
