"""The KV cache: keys and values of earlier tokens, which decoding does not compute again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_sizes
from xformer.ops._pointwise import clip

Window = tuple[int | None, int | None]


@short
class KVCache(NamedTuple):
    """The KV cache of one layer. Keys are stored after normalisation and RoPE. Empty at first.

    A static cache has preallocated slots: its arrays never change their shape, and `write_index`
    says where the next token is written. A mask hides the slots that are not written yet.
    """

    k: Array | None = None  # (B, G, S, K)
    v: Array | None = None  # (B, G, S, M)
    storage: Any = None  # a backend's buffer, to which it appends without a copy
    write_index: Array | None = None  # integer (), the slot of the next token; None: not static

    @property
    def length(self) -> int:
        """S, the number of stored tokens; the number of slots if the cache is static."""
        return 0 if self.k is None else int(self.k.shape[2])

    def last(self, n: int) -> KVCache:
        """A view of the last `n` tokens, for attention with a window."""
        if self.k is None or self.v is None or self.length <= n:
            return self
        start = self.length - n
        k, v = self.k[:, :, start:, :], self.v[:, :, start:, :]
        storage = None if self.storage is None else self.storage.narrowed(self, k, v)
        return self._replace(k=k, v=v, storage=storage)

    def padded(self, n: int) -> KVCache:
        """A copy with `n` slots of padding before the first; a negative n removes -n slots."""
        if self.k is None or self.v is None or n == 0:
            return self
        if n < 0:
            return KVCache(self.k[:, :, -n:, :], self.v[:, :, -n:, :])
        xp = array_namespace(self.k)

        def longer(a: Array) -> Array:
            shape = (*a.shape[:2], n, a.shape[3])
            return xp.concat([xp.zeros(shape, dtype=a.dtype, device=device(a)), a], axis=2)

        return KVCache(longer(self.k), longer(self.v))

    def preallocate(self, n: int, length: int) -> KVCache:
        """A copy with `n` slots. The last token is written to slot `length - 1`; the rest is 0."""
        if self.k is None or self.v is None:
            return self
        xp = array_namespace(self.k)

        def in_slots(a: Array) -> Array:
            tokens = a[:, :, : min(length, a.shape[2]), :]

            def zeros(n: int) -> Array:
                shape = (*a.shape[:2], n, a.shape[3])
                return xp.zeros(shape, dtype=a.dtype, device=device(a))

            return xp.concat([zeros(length - tokens.shape[2]), tokens, zeros(n - length)], axis=2)

        return KVCache(in_slots(self.k), in_slots(self.v))

    def window_mask(self, mask: Array, n: int) -> Array:
        """`mask` (..., T, S) of a static cache, without slots more than `n` before a token."""
        if self.write_index is None or n >= self.length:
            return mask
        xp = array_namespace(mask)
        slot = xp.arange(self.length, device=device(mask))
        return mask & (slot >= write_indices(self.write_index, mask.shape[-2]) - n)

    def truncated(self, n: int, *, needs: int) -> KVCache:
        """The cache without its last `n` tokens.

        needs: how many tokens before them attention reads. ValueError if a window has dropped some
        of these.
        """
        if self.k is None or self.v is None or n == 0:
            return self
        left = self.length - n
        if left < needs:
            raise ValueError(
                f"truncate: without the last {n} tokens {needs} earlier keys are needed, and a "
                f"window has left {max(left, 0)}; truncate by no more than the last decode added"
            )
        return KVCache(self.k[:, :, :left, :], self.v[:, :, :left, :])

    def rows(self, ids: Array) -> KVCache:
        """A copy of the sequences `ids` (B',) of the batch, in this order."""
        if self.k is None or self.v is None:
            return self
        xp = array_namespace(self.k)
        return KVCache(xp.take(self.k, ids, axis=0), xp.take(self.v, ids, axis=0))


def require_rows(tokens: Array, n_rows: int) -> None:
    """ValueError if tokens (B, T) do not continue the `n_rows` sequences of a state."""
    if tokens.shape[0] != n_rows:
        raise ValueError(
            f"decode: tokens must have the batch size of the state, {n_rows}, got {tokens.shape[0]}"
        )


def write_indices(write_index: Array, n: int) -> Array:
    """The slots of the next `n` tokens: (n, 1), or () for one token."""
    if n == 1:
        return write_index
    xp = array_namespace(write_index)
    return (write_index + xp.arange(n, device=device(write_index)))[:, None]


def truncated(
    kv_cache: Sequence[KVCache], windows: Sequence[Window | None], *, length: int, n: int
) -> tuple[KVCache, ...]:
    """The KV cache of each layer of `length` tokens, without the last `n`.

    ValueError for n outside [0, length], or if a layer's window has dropped keys that are needed.
    """
    (n,) = require_sizes("truncate", 0, n=n)
    if n > length:
        raise ValueError(f"truncate: n must be at most the {length} tokens there are, got {n}")
    left = length - n
    layers = zip(kv_cache, windows, strict=True)
    return tuple(
        layer.truncated(n, needs=left if not w or w[0] is None else min(w[0], left))
        for layer, w in layers
    )


@overridable(backward=False)
def append(k: Array, v: Array, *, kv_cache: KVCache) -> KVCache:
    """`kv_cache` followed by k (B, G, T, K) and v (B, G, T, M). `kv_cache` itself stays unchanged.

    To a static cache k and v are written at its `write_index`; the slots must exist, and a backend
    may write into the cache's own arrays.
    """
    if kv_cache.k is None or kv_cache.v is None:
        return KVCache(k, v)
    xp = array_namespace(k)
    if kv_cache.write_index is not None:
        slot, n = xp.arange(kv_cache.length, device=device(k)), k.shape[2]
        is_new = slot[:, None] == kv_cache.write_index  # (S, 1)
        if n > 1:
            new = slot - kv_cache.write_index  # the token of k and v for each slot
            is_new = ((new >= 0) & (new < n))[:, None]
            k, v = (xp.take(a, clip(new, 0, n - 1), axis=2) for a in (k, v))  # (B, G, S, .)
        k, v = xp.where(is_new, k, kv_cache.k), xp.where(is_new, v, kv_cache.v)
        return kv_cache._replace(k=k, v=v)
    return KVCache(xp.concat([kv_cache.k, k], axis=2), xp.concat([kv_cache.v, v], axis=2))
