"""`append` to a static KV cache: in place, or to a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.flash_rows import copy
from xformer.backends.numba.jit import rowwise
from xformer.backends.numba.kernels.layout import record, unrecordable
from xformer.backends.numba.program.copies import contiguous
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.program import program_of
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
    ins = [kv_cache.write_index, *map(contiguous, (k, v, *old))]
    pieces = program_of(*ins).pieces(k.size + v.size)  # the work of a write in place
    new = record(write, "append", *ins, pieces=pieces, in_place=[(3,), (4,)])
    return kv_cache._replace(k=new[0], v=new[1])


@declared(
    "new_k (N, S, K), new_v (N, S, M) <- "
    "write_index () int64, k (N, T, K), v (N, T, M), old_k (N, S, K), old_v (N, S, M)"
)
def write(new_k: Any, new_v: Any, write_index: Any, k: Any, v: Any, old_k: Any, old_v: Any) -> None:
    """Write new keys and values for N = B G sequences and heads.

    Tokens whose slot is outside [0, S) are left out.
    """
    slot = min(max(write_index[0], -k.shape[1]), old_k.shape[1])
    for i in range(len(k)):
        _write(old_k[i], k[i], slot, new_k[i])
        _write(old_v[i], v[i], slot, new_v[i])


@rowwise
def _write(old: Any, x: Any, slot: int, new: Any) -> None:
    """Write new (S, K) = old (S, K), with the tokens x (T, K) from `slot` on."""
    if new.ctypes.data != old.ctypes.data:
        copy(old.reshape(old.size), new.reshape(new.size))
    for j in range(max(0, -slot), min(len(x), len(new) - slot)):
        copy(x[j], new[slot + j])
