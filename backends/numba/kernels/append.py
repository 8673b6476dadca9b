"""`append` in fixed columns: new ones are written where the others are, or all are copied."""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.kernels.layout import program_of, unrecordable
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import Native, float32s, native, part, words

from xformer.dispatch import kernel
from xformer.layers.past import Past
from xformer.layers.past import append as op
from xformer.typing import Array


def unsupported(k: Array, v: Array, *, past: Past) -> str | None:
    """Why the kernel cannot run."""
    if past.at is None or past.k is None or past.v is None:
        return "no fixed columns"
    if past.at.dtype != np.int64 or past.at.shape:
        return "the column is no int64"
    fits = (*k.shape[:2], k.shape[3]) == (*past.k.shape[:2], past.k.shape[3])
    fits &= v.shape == (*k.shape[:3], past.v.shape[3])
    return unrecordable(k, v, past.k, past.v) if fits else "the reference says what is wrong"


@kernel(op, "numba.kernels", unsupported=unsupported)
def append(k: Array, v: Array, *, past: Past) -> Past:
    """k (B, G, T, K) and v (B, G, T, M) in the columns from `past.at` on, by one instruction.

    A program writes results over what is donated, where it can (`donate`): the kernel then finds
    the other columns in their places.
    """
    old: Any = past.k, past.v
    program, (b, g, s, width) = program_of(k, v, *old, past.at), old[0].shape
    outs = [program.fresh(x.shape, np.float32) for x in old]

    def run(new_k: Any, new_v: Any, at: Any, *ins: Any) -> None:
        found = op.reference(*ins[:2], past=Past(ins[2], ins[3], at=at))
        np.copyto(new_k, found.k)
        np.copyto(new_v, found.v)

    numbers = b * g, s, width, v.shape[3], k.shape[2]
    ins = [past.at, *map(contiguous, (k, v, *old))]
    pieces = program.pieces(k.size + v.size)  # which is all there is to do in place
    own = Native(write, numbers, pieces)
    program.emit("append", run, outs, ins, own, in_place=[(3,), (4,)])
    return past._replace(k=outs[0], v=outs[1])


@native
def write(args: int, piece: int, pieces: int, memory: int) -> None:
    """New keys and values; the column, k, v, old keys and values, N = B G, S, K, M, T.

    Pieces are rows of N. A column that there is not is not written.
    """
    a = words(args, 12)
    n, s, t = a[7], a[8], a[11]
    column = min(max(words(a[2], 1)[0], -t), s)
    first, last = max(0, -column), min(t, s - column)
    start, stop = part(n, piece, pieces, 1)
    for which in range(2):
        new, one, old, width = a[which], a[3 + which], a[5 + which], a[9 + which]
        for i in range(start, stop):
            rows, size = 4 * i * s * width, s * width
            if new != old:
                float32s(new + rows, (size,))[:] = float32s(old + rows, (size,))
            for j in range(first, last):
                own = float32s(new + rows + 4 * (column + j) * width, (width,))
                own[:] = float32s(one + 4 * (i * t + j) * width, (width,))
