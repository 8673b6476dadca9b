"""`index_add`: each piece adds all rows, of its own columns: threads never write one element."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.flash_rows import copy
from xformer.backends.numba.kernels.layout import record, recorded
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.namespace import take
from xformer.backends.numba.program.native import LINE
from xformer.backends.numba.program.program import program_of
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_ids, require_shape


@recorded(ops.index_add)
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, NumbaIndexAddCache]:
    """out = x, then out[ids[n]] += y[n] for every n (`ops.index_add`).

    x, out: (V, D), y: (N, D), in float32; ids: (N,) integers in [0, V)
    """
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    return emit_sums("index_add", x.shape, y, ids, x), NumbaIndexAddCache(ids, x.shape)


@short
class NumbaIndexAddCache(NamedTuple):
    """Saved by `index_add` for backward: only the ids."""

    ids: Array  # (N,)
    shape: tuple[int, ...]  # (V, D)

    def backward(self, dout: Array) -> tuple[Array, Array]:
        """dx = dout, dy = dout[ids].   dout, dx: (V, D)   dy: (N, D)"""
        require_shape("index_add", "dout", dout, self.shape)
        return dout, take(dout, self.ids, axis=0)


def emit_sums(
    name: str, shape: tuple[int, ...], y: Array, ids: Array, x: Array | None = None
) -> Array:
    """Return out (V, D): x, or zeros if x is None, with y (N, D) added at the rows `ids` (N,).

    name: of the instruction. shape: (V, D). The caller has checked that ids are in [0, V).
    """
    pieces = program_of(y, ids, x).pieces(shape[0] * shape[1] + y.size)
    return record(add_rows, name, y, ids, x, shapes={"V": shape[:1]}, pieces=pieces)[0]


@declared("out (V, D) <- y (N, D), ids (N) int64, x? (V, D)", cut="D", unit=LINE)
def add_rows(out: Any, y: Any, ids: Any, x: Any, start: int, stop: int) -> None:
    """Write out = x, or 0 without x, and add y[i] to out[ids[i]] for all i, in some columns.

    The ids were checked, but the caller may change their array during a run: a row whose id is out
    of range is left out.
    """
    for i in range(len(out)):
        row = out[i, start:stop]
        if len(x):
            copy(x[i, start:stop], row)
        else:
            row[:] = np.float32(0)
    for i in range(len(ids)):
        index = ids[i]  # read once: the bounds check must be of the value that is used
        if 0 <= index < len(out):
            row, addend = out[index, start:stop], y[i, start:stop]
            for j in range(stop - start):
                row[j] += addend[j]
