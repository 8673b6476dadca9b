"""`experts` with only the chosen rows of each expert: C / E of the reference's products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from xformer.backends.numpy.ids import private_copy
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.ops.experts import ExpertCache, of_expert, one_expert, require_choice
from xformer.ops.experts import experts as reference


@kernel(reference, "numpy")
def experts(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    weights: Array,
    b_gate: Array | None = None,
    b_up: Array | None = None,
    b_down: Array | None = None,
    *,
    ids: Array,
    activation: str = "silu",
    trainable: bool = True,
) -> tuple[Array, NumpyExpertsCache]:
    """Gather the rows of each chosen expert, and add its weighted output to these rows of y."""
    ids = require_choice(private_copy(ids), w_gate, activation)
    ws = w_gate, w_up, w_down, b_gate, b_up, b_down
    y, parts = np.zeros(x.shape, x.dtype), []
    for e, rows, is_chosen in _assigned(ids):
        share = np.where(is_chosen, weights[rows], 0).sum(axis=1)
        y_e, part = one_expert(x[rows], of_expert(ws, e), share, activation)
        y[rows] += y_e
        parts.append(part)
    return y, NumpyExpertsCache(x, ws, ids, activation, trainable, tuple(parts))


@short
class NumpyExpertsCache(NamedTuple):
    """Saved by `experts` for backward: its inputs, and the cache of each chosen expert."""

    x: Array  # (N, D)
    ws: tuple[Array | None, ...]  # w_gate, w_up, w_down, b_gate, b_up, b_down
    ids: Array  # (N, C)
    activation: str
    trainable: bool
    parts: tuple[ExpertCache, ...]  # one for each chosen expert, in ascending order

    def backward(self, dy: Array) -> tuple[Array | None, ...]:
        """Return the gradients of x, w_gate, w_up, w_down, weights, b_gate, b_up and b_down.

        The weight gradients of an expert that no row chose are 0.
        """
        require_gradient("experts", "dy", dy, self.x)
        x, ids = self.x, self.ids
        dx, dweights = np.zeros(x.shape, dy.dtype), np.zeros(ids.shape, dy.dtype)
        dws = [
            np.zeros(w.shape, dy.dtype) if self.trainable and w is not None else None
            for w in self.ws
        ]
        for (e, rows, is_chosen), part in zip(_assigned(ids), self.parts, strict=True):
            dx_e, dw_e, dshare = part.backward(
                dy[rows], x[rows], of_expert(self.ws, e), self.activation, self.trainable
            )
            dx[rows] += dx_e
            for dw, dw_of_expert in zip(dws, dw_e, strict=True):
                if dw is not None:
                    dw[e] = dw_of_expert
            dweights[rows] += np.where(is_chosen, dshare[:, None], 0)
        return dx, *dws[:3], dweights, *dws[3:]


def _assigned(ids: Array) -> Iterator[tuple[int, Array, Array]]:
    """Yield each chosen expert e, the indices (R,) of its rows, and ids[rows] == e (R, C)."""
    for e in np.unique(ids):
        rows = np.flatnonzero((ids == e).any(axis=1))
        yield int(e), rows, ids[rows] == e
