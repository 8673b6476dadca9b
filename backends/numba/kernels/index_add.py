"""`index_add`: each piece adds all rows, of its own columns: threads never write one element."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.flash_rows import copy
from xformer.backends.numba.program import program
from xformer.backends.numba.program.namespace import contiguous, take
from xformer.backends.numba.program.native import (
    LINE,
    Native,
    float32s,
    native,
    numbers,
    operands,
    part,
    words,
)
from xformer.backends.numba.program.program import Program
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_ids, require_shape


def unsupported(x: Array, y: Array, *, ids: Array) -> str | None:
    """Return why the numba kernel of `index_add` cannot run, or None if it can.

    It needs x and y in float32. x, y and ids must not all be constants of the program.
    """
    if x.dtype != np.float32 or y.dtype != np.float32:
        return "only float32"
    return None if program.of([x, y, ids]) else "all arrays are constants"


@kernel(ops.index_add, "numba.kernels", unsupported=unsupported)
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, NumbaIndexAddCache]:
    """out = x, then out[ids[n]] += y[n] for every n (`ops.index_add`).

    x, out: (V, D), y: (N, D), in float32; ids: (N,) integers in [0, V)
    """
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    recorder = program.of([x, y, ids])
    assert recorder is not None  # `unsupported` has checked this
    return emit_sums(recorder, "index_add", x.shape, y, ids, x), NumbaIndexAddCache(ids, x.shape)


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
    recorder: Program,
    name: str,
    shape: tuple[int, ...],
    y: Array,
    ids: Array,
    x: Array | None = None,
) -> Array:
    """Return out (V, D): x, or zeros if x is None, with y (N, D) added at the rows `ids` (N,).

    name: of the instruction. shape: (V, D). The caller has checked that ids are in [0, V).
    """
    out = recorder.fresh(shape, np.float32)
    ins = [contiguous(y), contiguous(ids)] + ([] if x is None else [contiguous(x)])

    def run(out: Any, y: Any, ids: Any, x: Any = 0) -> None:
        out[...] = x
        np.add.at(out, ids, y)

    compiled = Native(add_rows, (len(ids), *shape), recorder.pieces(out.size + y.size))
    recorder.emit(name, run, [out], ins, compiled)
    return out


@native
def add_rows(args: int, piece: int, pieces: int, memory: int) -> None:
    """Add y[i] to out[ids[i]] for all i, for a piece of the columns.

    outputs: out (V, D); inputs: y (N, D), ids (N,) int64, and x (V, D) if present, else x is 0.
    integers: N, V, D. The ids were checked, but the caller may change their array during a run: a
    row whose id is out of range is left out.
    """
    ptr, a = words(args, 4), numbers(args, 3)
    n, n_rows, width = a[0], a[1], a[2]
    start, stop = part(width, piece, pieces, LINE)
    size = (max(stop - start, 0),)
    for i in range(n_rows):
        row = float32s(ptr[0] + 4 * (i * width + start), size)
        if operands(args) == 4:
            copy(float32s(ptr[3] + 4 * (i * width + start), size), row)
        else:
            row[:] = np.float32(0)
    ids = words(ptr[2], n)
    for i in range(n):
        index = ids[i]  # read once: the bounds check must be of the value that is used
        if 0 <= index < n_rows:
            row = float32s(ptr[0] + 4 * (index * width + start), size)
            addend = float32s(ptr[1] + 4 * (i * width + start), size)
            for j in range(stop - start):
                row[j] += addend[j]
