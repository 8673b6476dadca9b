"""The state of decoding: the KV cache of each layer, and which of its slots hold tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import as_indices, require_mask
from xformer.layers.attention import KeyValue
from xformer.layers.kv_cache import KVCache, write_indices


@short
class DecodeState(NamedTuple):
    """The sequences so far, as `decode` of a model needs them.

    A static state (`preallocate`) has a KV cache of a fixed number of slots. Its length is an
    integer array (), so that every step does the same work on arrays of the same shapes.
    """

    kv_cache: Sequence[KVCache]  # of each layer
    mask: Array | None = None  # (B, S), True = a token, False = padding; None: no padding
    length: Any = 0  # S; if the state is static, an integer array (): the number of written slots
    # For a model whose RoPE frequencies change with the length; None otherwise:
    rope_length: int | None = None  # by which the keys are rotated (`layers.rope_by_layer`)
    ids: Array | None = None  # (B, S), to compute the keys again
    # Whether the KV cache is preallocated. The type of `length` does not say it: compiled functions
    # get numbers as arrays.
    is_static: bool = False
    # Of an encoder-decoder's source: keys and values for each layer, and which are tokens.
    memory: tuple[KeyValue, ...] = ()
    src_mask: Array | None = None  # (B, S), True = a token, False = padding; None: no padding

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens yet."""
        return self.kv_cache[0].k is None

    @property
    def write_index(self) -> Array | None:
        """The slot of the next token if the state is static, else None."""
        return self.length if self.is_static else None

    @property
    def capacity(self) -> int:
        """The number of slots of a static state."""
        if self.mask is not None:
            return int(self.mask.shape[1])
        return max(layer.length for layer in self.kv_cache)  # a RecurrentState has none

    def preallocate(self, n: int) -> DecodeState:
        """A static copy with a preallocated KV cache of `n` slots.

        `Backend.compiled` needs it. ValueError for a state without tokens, for fewer slots than
        tokens, and if its RoPE frequencies change with its length.
        """
        length = int(self.length)
        if self.is_empty or n < length:
            raise ValueError(
                f"preallocate: n must be at least the {length} tokens there are, got {n}"
            )
        if self.rope_length:
            raise ValueError(
                f"preallocate: the RoPE frequencies of {length} tokens change with the length"
            )
        k, mask = self.kv_cache[0].k, self.mask
        xp, where = array_namespace(k), device(k)
        if mask is not None:
            ones = xp.ones((mask.shape[0], n - length), dtype=xp.bool, device=where)
            mask = xp.concat([mask[:, :length], ones], axis=1)
        dtype = xp.__array_namespace_info__().default_dtypes(device=where)["indexing"]
        kv_cache = tuple(layer.preallocate(n, length) for layer in self.kv_cache)
        length = xp.asarray(length, dtype=dtype, device=where)
        state = self._replace(kv_cache=kv_cache, mask=mask, length=length, is_static=True)
        return state._replace(rope_length=None, ids=None)

    def wider(self, n: int) -> DecodeState:
        """A copy with the source padded on the right to `n` slots. The mask hides the padding."""
        first = self.memory[0].k
        xp, (size, _, length, _) = array_namespace(first), first.shape
        distinct = {id(kv): kv for kv in self.memory}  # layers may share keys and values
        wide = {i: KeyValue(*KVCache(*kv).preallocate(n, length)[:2]) for i, kv in distinct.items()}
        is_token = xp.arange(n, device=device(first)) < length
        mask = xp.broadcast_to(is_token[None, :], (size, n))
        if self.src_mask is not None:
            rest = xp.zeros((size, n - length), dtype=xp.bool, device=device(first))
            mask = xp.concat([self.src_mask, rest], axis=1)
        return self._replace(memory=tuple(wide[id(kv)] for kv in self.memory), src_mask=mask)

    def static_kv_cache(self) -> tuple[KVCache, ...]:
        """The KV cache of each layer with the `write_index` of the next token."""
        return tuple(layer._replace(write_index=self.length) for layer in self.kv_cache)

    def key_mask(self, n: int) -> Array:
        """(B or 1, n, S): the slots that each of the next `n` tokens of a static state attends."""
        xp = array_namespace(self.length)
        slot = xp.arange(self.capacity, device=device(self.length))
        written = xp.reshape(slot <= write_indices(self.length, n), (1, n, self.capacity))
        return written if self.mask is None else written & self.mask[:, None, :]

    def position_ids(self, n: int) -> Array:
        """(B, n) or (n,): the positions of the next `n` tokens of a static state."""
        xp = array_namespace(self.length)
        if self.mask is None:
            return xp.reshape(write_indices(self.length, n), (n,))
        tokens = xp.astype(self.key_mask(n), self.length.dtype)
        return xp.sum(tokens, axis=2, dtype=self.length.dtype) - 1

    def truncated_length(self, n: int) -> Array:
        """The length of a static state without its last `n` tokens."""
        return array_namespace(self.length).asarray(self.length - n, device=device(self.length))

    def appended(
        self, kv_cache: Sequence[KVCache], mask: Array | None, tokens: Array
    ) -> DecodeState:
        """The state after `tokens` (B, T), with their KV cache and the mask of all slots."""
        if self.is_static:
            kv_cache = tuple(layer._replace(write_index=None) for layer in kv_cache)
            mask = self.mask
        ids = self.ids
        if self.rope_length is not None:
            # A copy, even of the first tokens: a caller may write over an array of ids.
            before = tokens[:, :0] if ids is None else ids
            ids = array_namespace(tokens).concat([before, tokens], axis=1)
        length = self.length + tokens.shape[1]
        return self._replace(kv_cache=kv_cache, mask=mask, length=length, ids=ids)

    def rows(self, ids: Array) -> DecodeState:
        """The sequences `ids` (B',) of the batch, in this order."""

        def taken(a: Array | None) -> Any:
            return None if a is None else array_namespace(a).take(a, ids, axis=0)

        return self._replace(
            kv_cache=tuple(layer.rows(ids) for layer in self.kv_cache),
            mask=taken(self.mask),
            ids=taken(self.ids),
            memory=tuple(KeyValue(taken(kv.k), taken(kv.v)) for kv in self.memory),
            src_mask=taken(self.src_mask),
        )

    def padded(self, length: int) -> DecodeState:
        """The same sequences in `length` slots: padding on the left is added or removed.

        For libraries that compile anew for every shape. The caller makes sure that only padding is
        removed; this is not checked. A layer that keeps only the last keys of its window is left
        as it is.
        """
        n = length - self.length
        k = next((layer.k for layer in self.kv_cache if layer.k is not None), None)
        if n == 0 or k is None:
            return self
        xp = array_namespace(k)
        options: Any = {"dtype": xp.bool, "device": device(k)}
        ones, zeros = (partial(fill, **options) for fill in (xp.ones, xp.zeros))
        mask = ones((k.shape[0], self.length)) if self.mask is None else self.mask
        mask = mask[:, -n:] if n < 0 else xp.concat([zeros((k.shape[0], n)), mask], axis=1)
        ids = self.ids
        if ids is not None:
            before = xp.zeros((k.shape[0], max(n, 0)), dtype=ids.dtype, device=device(ids))
            ids = xp.concat([before, ids[:, max(-n, 0) :]], axis=1)
        # A layer whose window has dropped keys has no padding to add to or remove.
        kv_cache = [p if p.length < self.length else p.padded(n) for p in self.kv_cache]
        return self._replace(kv_cache=tuple(kv_cache), mask=mask, length=length, ids=ids)


def key_mask(op: str, name: str, mask: Array | None, x: Array) -> Array | None:
    """The mask of the keys, (B, 1, 1, S), which attention broadcasts over heads and queries.

    name: of the argument, for messages
    mask: (B, S), True = a token, False = padding; None: no padding, and the result is None
    x: the sequence, (B, S) or (B, S, ...)
    ValueError or TypeError for another mask.
    """
    if mask is None:
        return None
    require_mask(op, name, mask, x)
    if tuple(mask.shape) != tuple(x.shape[:2]):
        raise ValueError(
            f"{op}: {name} must be (B, T) = {tuple(x.shape[:2])} like the sequence, "
            f"got shape {tuple(mask.shape)}"
        )
    return mask[:, None, None, :]


def appended_mask(
    before: Array | None, mask: Array | None, tokens: Array, n_cached: int
) -> Array | None:
    """The mask of the cached tokens and of `tokens` after them; None if there is no padding."""
    key_mask("LanguageModel", "mask", mask, tokens)
    if before is None and mask is None:
        return None
    xp = array_namespace(tokens)

    def ones(n: int) -> Array:
        return xp.ones((tokens.shape[0], n), dtype=xp.bool, device=device(tokens))

    before = ones(n_cached) if before is None else before
    return xp.concat([before, ones(tokens.shape[1]) if mask is None else mask], axis=1)


def position_ids(mask: Array) -> Array:
    """(B, S): the position of each token, counted without padding; 0 for padding on the left."""
    xp = array_namespace(mask)
    count = xp.cumulative_sum(as_indices(xp.astype(mask, xp.uint8)), axis=-1)
    return xp.maximum(count - 1, xp.zeros_like(count))
