"""`append` for libraries whose arrays can be written to: amortised, without copying the cache."""

from __future__ import annotations

import os
from typing import Any

from array_api_compat import array_namespace, device

from xformer.backends.exclusive import Exclusive
from xformer.layers.kv_cache import KVCache
from xformer.typing import Array

LEAST = 64  # tokens

_claims = Exclusive()


def _forked() -> None:
    global _claims
    _claims = Exclusive()  # a lock that another thread held is not released in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class KVBuffer:
    """Buffers with free slots behind slot `end`; only a view of all slots before it appends."""

    def __init__(self, kv_cache: KVCache, k: Array, v: Array) -> None:
        self.capacity = max(LEAST, 2 * (kv_cache.length + k.shape[2]))
        self.k, self.v = (_buffer(new, self.capacity) for new in (k, v))
        self.end = kv_cache.length
        if kv_cache.k is not None and kv_cache.v is not None:
            self.k[:, :, : self.end, :] = kv_cache.k
            self.v[:, :, : self.end, :] = kv_cache.v


class KVBufferView:
    """`KVCache.storage`: k and v are slots of a buffer, and `end` is the slot after them."""

    __slots__ = ("buffer", "end", "k", "v")

    def __init__(self, buffer: KVBuffer, end: int, k: Array, v: Array) -> None:
        self.buffer, self.end, self.k, self.v = buffer, end, k, v

    def is_of(self, kv_cache: KVCache) -> bool:
        """Whether the cache's arrays are still those of this view."""
        return kv_cache.k is self.k and kv_cache.v is self.v

    def narrowed(self, kv_cache: KVCache, k: Array, v: Array) -> KVBufferView | None:
        """The view of the cache's last slots k and v."""
        return KVBufferView(self.buffer, self.end, k, v) if self.is_of(kv_cache) else None


def unsupported(k: Array, v: Array, *, kv_cache: KVCache) -> str | None:
    """Why `append` cannot run."""
    return None if kv_cache.write_index is None else "the KV cache is static"


def append(k: Array, v: Array, *, kv_cache: KVCache) -> KVCache:
    """Write behind the stored tokens; to a new buffer if it is full or another cache did so."""
    grown = reserved(k, v, kv_cache=kv_cache)
    new = slice(kv_cache.length, None)
    grown.k[:, :, new, :], grown.v[:, :, new, :] = k, v
    return grown


def reserved(k: Array, v: Array, *, kv_cache: KVCache) -> Any:
    """`kv_cache` with slots for k and v at its end, which the caller writes."""
    n, view = k.shape[2], kv_cache.storage
    if view is not None and _alike(view.buffer.k, k) and _alike(view.buffer.v, v):
        grown = longer(kv_cache, n)
        if grown is not None:
            return grown
    buffer = KVBuffer(kv_cache, k, v)
    buffer.end += n
    return last_slots(buffer, buffer.end, buffer.end)


def longer(kv_cache: KVCache, n: int) -> Any:
    """`kv_cache` with `n` further slots that nobody has written; None if its buffer has none."""
    view = kv_cache.storage
    if view is None or not view.is_of(kv_cache) or not claimed(view.buffer, view.end, n):
        return None
    return last_slots(view.buffer, view.end + n, kv_cache.length + n)


def claimed(buffer: KVBuffer, end: int, n: int) -> bool:
    """Claim `n` slots behind `end`. False if they are not free."""
    return _claims.run(_claim, buffer, end, n)  # two threads may continue one sequence at once


def _claim(buffer: KVBuffer, end: int, n: int) -> bool:
    if buffer.end != end or end + n > buffer.capacity:
        return False
    buffer.end = end + n
    return True


def last_slots(buffer: KVBuffer, end: int, n: int) -> KVCache:
    """The last `n` slots before `end`."""
    slots = slice(end - n, end)
    k, v = buffer.k[:, :, slots, :], buffer.v[:, :, slots, :]
    return KVCache(k, v, KVBufferView(buffer, end, k, v))


def _alike(buffer: Array, new: Array) -> bool:
    one, other = buffer.shape, new.shape
    return (*one[:2], one[3], buffer.dtype) == (*other[:2], other[3], new.dtype)


def _buffer(new: Array, capacity: int) -> Array:
    shape = (*new.shape[:2], capacity, new.shape[3])
    return array_namespace(new).empty(shape, dtype=new.dtype, device=device(new))
