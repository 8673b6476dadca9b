"""`append` to a KV cache in place: after the last token, or at an index stored on the device."""

from __future__ import annotations

from typing import Any

from xformer.backends.append import append as in_place
from xformer.backends.append import unsupported
from xformer.backends.cupy.module import EVERY, Source, blocks, contiguous, launch
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.shapes import STORED
from xformer.layers.kv_cache import KVCache
from xformer.layers.kv_cache import append as reference

SOURCE = Source(__file__, dtypes=EVERY)
BLOCK = 256  # threads; each copies one element

append = kernel(reference, "cupy", unsupported=unsupported)(in_place)


def static_unsupported(k: Array, v: Array, *, kv_cache: KVCache) -> str | None:
    """Return why `append_at` cannot run, or None if it can."""
    keys, values, _, at = kv_cache
    if at is None or keys is None or values is None:
        return "the KV cache is not static"
    if any(type(x) is not type(k) for x in (v, keys, values, at)) or at.dtype.name != "int64":
        return "kv_cache.write_index must be int64, and all arrays of one library"
    if not all(x.dtype == k.dtype for x in (v, keys, values)):
        return "keys and values must be of one dtype, that of the KV cache"
    if not (keys.flags.c_contiguous and values.flags.c_contiguous):
        return "the KV cache is not contiguous"
    return None


@kernel(reference, "cupy", unsupported=static_unsupported, storage_dtypes=STORED)
def append_at(k: Array, v: Array, *, kv_cache: KVCache) -> KVCache:
    """Write the keys and values of one token into the arrays of a static KV cache; return it.

    k: (B, G, 1, K)   v: (B, G, 1, M)
    Raises ValueError if there is more than one token.
    """
    if k.shape[2] != 1:
        raise ValueError(f"append: a static KV cache takes one token at a time, got {k.shape[2]}")
    k, v = contiguous(k), contiguous(v)
    keys: Any = kv_cache.k
    n_batch, n_groups, columns, width = keys.shape
    rows, value_width = n_batch * n_groups, v.shape[3]
    launch(
        SOURCE,
        "append",
        k,
        grid=(blocks(rows * (width + value_width), BLOCK),),
        block=(BLOCK,),
        args=(k, v, keys, kv_cache.v, kv_cache.write_index, rows, columns, width, value_width),
    )
    return kv_cache
