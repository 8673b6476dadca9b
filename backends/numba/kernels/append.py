"""`append` to a static KV cache: in place, or to a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.kernels.layout import program_of, unrecordable
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.dispatch import kernel
from xformer.layers.kv_cache import KVCache
from xformer.layers.kv_cache import append as op
from xformer.typing import Array


def unsupported(k: Array, v: Array, *, kv_cache: KVCache) -> str | None:
    """Why the kernel cannot run."""
    if kv_cache.write_index is None or kv_cache.k is None or kv_cache.v is None:
        return "the KV cache is not static"
    if kv_cache.write_index.dtype != np.int64 or kv_cache.write_index.shape:
        return "write_index is no int64"
    fits = (*k.shape[:2], k.shape[3]) == (*kv_cache.k.shape[:2], kv_cache.k.shape[3])
    fits &= v.shape == (*k.shape[:3], kv_cache.v.shape[3])
    return (
        unrecordable(k, v, kv_cache.k, kv_cache.v) if fits else "the reference says what is wrong"
    )


@kernel(op, "numba.kernels", unsupported=unsupported)
def append(k: Array, v: Array, *, kv_cache: KVCache) -> KVCache:
    """One instruction writes k (B, G, T, K) and v (B, G, T, M) at `kv_cache.write_index`.

    If the old arrays are donated, a program writes the results into them (`donate`), and only the
    new slots are written.
    """
    old: Any = kv_cache.k, kv_cache.v
    program, (b, g, s, width) = program_of(k, v, *old, kv_cache.write_index), old[0].shape
    outs = [program.fresh(x.shape, np.float32) for x in old]

    def run(new_k: Any, new_v: Any, at: Any, *ins: Any) -> None:
        found: Any = op.reference(*ins[:2], kv_cache=KVCache(ins[2], ins[3], write_index=at))
        np.copyto(new_k, found.k)
        np.copyto(new_v, found.v)

    numbers = b * g, s, width, v.shape[3], k.shape[2]
    ins = [kv_cache.write_index, *map(contiguous, (k, v, *old))]
    pieces = program.pieces(k.size + v.size)  # which is all there is to do in place
    own = Native(write, numbers, pieces)
    program.emit("append", run, outs, ins, own, in_place=[(3,), (4,)])
    return kv_cache._replace(k=outs[0], v=outs[1])


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
