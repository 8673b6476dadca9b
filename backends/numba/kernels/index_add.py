"""`index_add`: rows are added one after the other, each piece its columns, so that none meet."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
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
from xformer.checks import require_ids, require_shape
from xformer.dispatch import kernel
from xformer.showing import short
from xformer.typing import Array


def unsupported(x: Array, y: Array, *, ids: Array) -> str | None:
    """Why the kernel cannot run."""
    if x.dtype != np.float32 or y.dtype != np.float32:
        return "only float32"
    return None if program.of([x, y, ids]) else "all arrays are constants"


@kernel(ops.index_add, "numba.kernels", unsupported=unsupported)
def index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    """out = x, then out[ids[n]] += y[n] for every n."""
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    recorder = program.of([x, y, ids])
    assert recorder is not None  # else this were unsupported
    return emit_sums(recorder, "index_add", x.shape, y, ids, x), IndexAddCache(ids, x.shape)


@short
class IndexAddCache(NamedTuple):
    """Saved by `index_add` for backward."""

    ids: Array  # (N,)
    shape: tuple[int, ...]  # (V, D)

    def backward(self, dout: Array) -> tuple[Array, Array]:
        """dx = dout, dy = dout[ids]."""
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
    """(V, D): x, or zeros, and y (N, D) added at the rows ids, which have been checked."""
    out = recorder.fresh(shape, np.float32)
    ins = [contiguous(y), contiguous(ids)] + ([] if x is None else [contiguous(x)])

    def run(out: Any, y: Any, ids: Any, x: Any = 0) -> None:
        out[...] = x
        np.add.at(out, ids, y)

    own = Native(add_rows, (len(ids), *shape), recorder.pieces(out.size + y.size))
    recorder.emit(name, run, [out], ins, own)
    return out


@native
def add_rows(args: int, piece: int, pieces: int, memory: int) -> None:
    """out; y, ids, x or zeros, N, V, D. Ids were checked, but lie where others may write."""
    at, a = words(args, 4), numbers(args, 3)
    n, n_rows, width = a[0], a[1], a[2]
    start, stop = part(width, piece, pieces, LINE)
    size = (max(stop - start, 0),)
    for i in range(n_rows):
        row = float32s(at[0] + 4 * (i * width + start), size)
        if operands(args) == 4:
            row[:] = float32s(at[3] + 4 * (i * width + start), size)
        else:
            row[:] = np.float32(0)
    ids = words(at[2], n)
    for i in range(n):
        number = ids[i]  # read once: it is this one that was looked at
        if 0 <= number < n_rows:
            row = float32s(at[0] + 4 * (number * width + start), size)
            own = float32s(at[1] + 4 * (i * width + start), size)
            for j in range(stop - start):
                row[j] += own[j]
