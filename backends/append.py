"""`append` in place, for libraries with writable arrays: buffers with free slots for later tokens.

A full buffer is copied to one of twice the length. So to append a token takes constant time on
average.
"""

from __future__ import annotations

import os
from typing import Any

from array_api_compat import device

from xformer.backends.exclusive import Exclusive
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.layers.kv_cache import KVCache

MIN_CAPACITY = 64  # slots; a slot holds the key and the value of one token of each sequence

_claims = Exclusive()


def _forked() -> None:
    """Replace `_claims` in a forked child: its lock may be held by a thread of the parent."""
    global _claims
    _claims = Exclusive()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class KVBuffer:
    """Buffers of keys and values. Slots from `end` on are free; the slots before it are claimed.

    Several KV caches can be views of one buffer. Only a cache that ends at `end` can claim more.
    """

    def __init__(self, kv_cache: KVCache, k: Array, v: Array) -> None:
        """Copy `kv_cache` to buffers with room for the new k (B, G, T, K), v (B, G, T, M)."""
        self.capacity = max(MIN_CAPACITY, 2 * (kv_cache.length + k.shape[2]))
        self.k, self.v = (_empty_buffer(new, self.capacity) for new in (k, v))
        self.end = kv_cache.length
        if kv_cache.k is not None and kv_cache.v is not None:
            self.k[:, :, : self.end, :] = kv_cache.k
            self.v[:, :, : self.end, :] = kv_cache.v


class KVBufferView:
    """`KVCache.storage`: k and v are views of consecutive slots of `buffer`, the last is `end` - 1.

    A KV cache whose arrays are not k and v themselves was changed, and must not use the buffer.
    """

    __slots__ = ("buffer", "end", "k", "v")

    def __init__(self, buffer: KVBuffer, end: int, k: Array, v: Array) -> None:
        self.buffer, self.end, self.k, self.v = buffer, end, k, v

    def is_of(self, kv_cache: KVCache) -> bool:
        """Return whether the arrays of `kv_cache` are the arrays of this view."""
        return kv_cache.k is self.k and kv_cache.v is self.v

    def narrowed(self, kv_cache: KVCache, k: Array, v: Array) -> KVBufferView | None:
        """Return the view for k and v, the last slots of `kv_cache`; None if it was changed."""
        return KVBufferView(self.buffer, self.end, k, v) if self.is_of(kv_cache) else None


def unsupported(k: Array, v: Array, *, kv_cache: KVCache) -> str | None:
    """Return why `append` cannot run, or None if it can."""
    return None if kv_cache.write_index is None else "the KV cache is static"


def append(k: Array, v: Array, *, kv_cache: KVCache) -> KVCache:
    """Return `kv_cache` followed by k (B, G, T, K) and v (B, G, T, M).

    They are written into the buffer of `kv_cache`. The cache is copied to a new buffer if that
    buffer is full, or if another cache has claimed its next slots.
    """
    longer = extended(k, v, kv_cache=kv_cache)
    new = slice(kv_cache.length, None)
    longer.k[:, :, new, :], longer.v[:, :, new, :] = k, v
    return longer


def extended(k: Array, v: Array, *, kv_cache: KVCache) -> Any:
    """Return `kv_cache` with slots for k and v at its end, which the caller must write."""
    n, view = k.shape[2], kv_cache.storage
    if view is not None and _fits(view.buffer.k, k) and _fits(view.buffer.v, v):
        longer = extended_in_place(kv_cache, n)
        if longer is not None:
            return longer
    buffer = KVBuffer(kv_cache, k, v)
    buffer.end += n
    return last_slots(buffer, buffer.end, buffer.end)


def extended_in_place(kv_cache: KVCache, n: int) -> Any:
    """Return `kv_cache` with the next `n` slots of its buffer; None if they cannot be claimed."""
    view = kv_cache.storage
    if view is None or not view.is_of(kv_cache) or not claim(view.buffer, view.end, n):
        return None
    return last_slots(view.buffer, view.end + n, kv_cache.length + n)


def claim(buffer: KVBuffer, end: int, n: int) -> bool:
    """Claim `n` slots from slot `end` on. Return False if they are not free."""
    return _claims.run(_claim, buffer, end, n)  # two threads may continue one sequence at once


def _claim(buffer: KVBuffer, end: int, n: int) -> bool:
    if buffer.end != end or end + n > buffer.capacity:
        return False
    buffer.end = end + n
    return True


def last_slots(buffer: KVBuffer, end: int, n: int) -> KVCache:
    """Return a KV cache of the `n` slots before slot `end`."""
    slots = slice(end - n, end)
    k, v = buffer.k[:, :, slots, :], buffer.v[:, :, slots, :]
    return KVCache(k, v, KVBufferView(buffer, end, k, v))


def _fits(buffer: Array, new: Array) -> bool:
    """Return whether `new` can be stored in `buffer`: equal dtype and shape except axis 2."""
    one, other = buffer.shape, new.shape
    return (*one[:2], one[3], buffer.dtype) == (*other[:2], other[3], new.dtype)


def _empty_buffer(new: Array, capacity: int) -> Array:
    shape = (*new.shape[:2], capacity, new.shape[3])
    return array_namespace(new).empty(shape, dtype=new.dtype, device=device(new))
