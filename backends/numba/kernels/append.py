"""`append` to a static KV cache: in place, or to a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.flash_rows import copy
from xformer.backends.numba.kernels.layout import program_of, unrecordable
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.layers.kv_cache import KVCache
from xformer.layers.kv_cache import append as op


def unsupported(k: Array, v: Array, *, kv_cache: KVCache) -> str | None:
    """Return why the numba kernel of `append` cannot run, or None if it can.

    It needs a static KV cache with an int64 scalar `write_index`, float32 arrays that are not all
    constants of the program, and shapes of k and v that fit the cache.
    """
    if kv_cache.write_index is None or kv_cache.k is None or kv_cache.v is None:
        return "the KV cache is not static"
    if kv_cache.write_index.dtype != np.int64 or kv_cache.write_index.shape:
        return "write_index is not an int64 scalar"
    fits = (*k.shape[:2], k.shape[3]) == (*kv_cache.k.shape[:2], kv_cache.k.shape[3])
    fits &= v.shape == (*k.shape[:3], kv_cache.v.shape[3])
    return unrecordable(k, v, kv_cache.k, kv_cache.v) if fits else "shapes do not fit"


@kernel(op, "numba.kernels", unsupported=unsupported)
def append(k: Array, v: Array, *, kv_cache: KVCache) -> KVCache:
    """Write k (B, G, T, K) and v (B, G, T, M) into the slots from `kv_cache.write_index` on.

    One instruction does both. If the cache's arrays are donated, the results reuse their memory
    (`donate`), and only the new slots are written.
    """
    old: Any = kv_cache.k, kv_cache.v
    program, (b, g, s, width) = program_of(k, v, *old, kv_cache.write_index), old[0].shape
    outs = [program.fresh(x.shape, np.float32) for x in old]

    def run(new_k: Any, new_v: Any, write_index: Any, *ins: Any) -> None:
        new: Any = op.reference(*ins[:2], kv_cache=KVCache(ins[2], ins[3], write_index=write_index))
        np.copyto(new_k, new.k)
        np.copyto(new_v, new.v)

    numbers = b * g, s, width, v.shape[3], k.shape[2]
    ins = [kv_cache.write_index, *map(contiguous, (k, v, *old))]
    pieces = program.pieces(k.size + v.size)  # the work of a write in place
    compiled = Native(write, numbers, pieces)
    program.emit("append", run, outs, ins, compiled, in_place=[(3,), (4,)])
    return kv_cache._replace(k=outs[0], v=outs[1])


@native
def write(args: int, piece: int, pieces: int, memory: int) -> None:
    """Write new keys and values for a piece of the N = B G sequences and heads.

    outputs: new keys (N, S, K), new values (N, S, M); inputs: write index () int64, k (N, T, K),
    v (N, T, M), old keys (N, S, K), old values (N, S, M). integers: N, S, K, M, T.
    Tokens whose slot is outside [0, S) are left out.
    """
    a = words(args, 12)
    n, s, t = a[7], a[8], a[11]
    slot = min(max(words(a[2], 1)[0], -t), s)
    first, last = max(0, -slot), min(t, s - slot)  # tokens to write
    start, stop = part(n, piece, pieces, 1)
    for which in range(2):  # keys, then values
        new, x, old, width = a[which], a[3 + which], a[5 + which], a[9 + which]
        for i in range(start, stop):
            offset, size = 4 * i * s * width, s * width
            if new != old:
                copy(float32s(old + offset, (size,)), float32s(new + offset, (size,)))
            for j in range(first, last):
                row = float32s(new + offset + 4 * (slot + j) * width, (width,))
                copy(float32s(x + 4 * (i * t + j) * width, (width,)), row)
