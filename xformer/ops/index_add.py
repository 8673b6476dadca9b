"""Adding rows at given indices, which may repeat."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_ids, require_shape
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (V, D)  y (N, D)  ids (N)")
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    """out = x, then out[ids[n]] += y[n] for every n; rows of repeated ids are summed.

    The array API standard has no such function. The order of summation is fixed, so the result is
    the same in every run.

    x: (V, D)   y: (N, D)   ids: (N,) integers in [0, V)   out: (V, D)
    Derivation: docs/derivations/index_add.md
    """
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    xp = array_namespace(x)
    if ids.shape[0] == 0:
        return x + 0, IndexAddCache(ids, x.shape)
    order = xp.argsort(ids, stable=True)
    sums = _running_sums(xp.take(y, order, axis=0), xp.take(ids, order))  # (N, D)
    # The last row of an id's segment holds its whole sum.
    wanted = xp.arange(x.shape[0], dtype=ids.dtype, device=device(x))
    end = xp.searchsorted(xp.take(ids, order), wanted, side="right")  # (V,)
    start = xp.searchsorted(xp.take(ids, order), wanted, side="left")
    last = xp.where(end > start, end - 1, 0)
    totals = xp.take(sums, last, axis=0)  # (V, D)
    return x + xp.where((end > start)[:, None], totals, 0.0), IndexAddCache(ids, x.shape)


@short
class IndexAddCache(NamedTuple):
    """Saved by `index_add` for backward: the ids. The op is linear, so x and y are not needed."""

    ids: Array  # (N,)
    shape: tuple[int, int]  # (V, D)

    def backward(self, dout: Array) -> tuple[Array, Array]:
        """dx = dout, dy = dout[ids]."""
        require_shape("index_add", "dout", dout, self.shape)
        return dout, array_namespace(dout).take(dout, self.ids, axis=0)


def _running_sums(y: Array, ids: Array) -> Array:
    """Row n is the sum of the rows of y up to n that have the same id, in log2(N) steps.

    ids must be sorted.
    """
    xp = array_namespace(y)
    step, rows = 1, y.shape[0]
    while step < rows:
        same = (ids[step:] == ids[:-step])[:, None]  # sorted: equal ends mean one segment
        y = xp.concat([y[:step, :], y[step:, :] + xp.where(same, y[:-step, :], 0.0)])
        step *= 2
    return y
