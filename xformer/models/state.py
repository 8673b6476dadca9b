"""A text so far, and which of its columns are tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from xformer.checks import as_indices, require_mask
from xformer.layers.past import Past, columns_of
from xformer.typing import Array


class State(NamedTuple):
    """A text so far, as `LanguageModel.extend` needs it."""

    past: Sequence[Past]  # of each layer
    mask: Array | None = None  # (B, S), True = a token, not padding; None: all are tokens
    length: Any = 0  # S; an integer array () where columns are fixed: how many have their token
    # Of a model whose RoPE frequencies change with the length; None otherwise:
    rope_length: int | None = None  # by which the keys are rotated (`RopeConfig.frequency_length`)
    ids: Array | None = None  # (B, S), to read the text again

    @property
    def is_fixed(self) -> bool:
        """Whether columns are fixed, as `in_columns` makes them."""
        return not isinstance(self.length, int)

    @property
    def at(self) -> Array | None:
        """Where columns are fixed, that of the next token."""
        return self.length if self.is_fixed else None

    @property
    def columns(self) -> int:
        """How many there are."""
        return self.past[0].length

    def in_columns(self, n: int) -> State:
        """The same texts in `n` columns that stay where they are, some of them for tokens to come.

        The length is then an array, so that each further token is the same work on the same arrays,
        as `Backend.compiled` wants it. A copy. ValueError for a state without a text, for fewer
        columns than it has tokens, and where its RoPE frequencies change with its length.
        """
        length = int(self.length)
        if self.past[0].k is None or n < length:
            raise ValueError(
                f"in_columns: n must be at least the {length} tokens there are, got {n}"
            )
        if self.rope_length:
            raise ValueError(
                f"in_columns: {length} tokens are more than RoPE frequencies stay the same for"
            )
        k, mask = self.past[0].k, self.mask
        xp, place = array_namespace(k), device(k)
        if mask is not None:
            ones = xp.ones((mask.shape[0], n - length), dtype=xp.bool, device=place)
            mask = xp.concat([mask[:, :length], ones], axis=1)
        kind = xp.__array_namespace_info__().default_dtypes(device=place)["indexing"]
        past = tuple(own.in_columns(n, length) for own in self.past)
        return State(past, mask, xp.asarray(length, dtype=kind, device=place))

    def in_place(self) -> tuple[Past, ...]:
        """The past, for the next token to be put where it belongs, where columns are fixed."""
        return tuple(own._replace(at=self.length) for own in self.past)

    def seen(self, n: int) -> Array:
        """(B or 1, n, S): the fixed columns up to that of each of the next `n` tokens."""
        xp = array_namespace(self.length)
        column = xp.arange(self.columns, device=device(self.length))
        seen = xp.reshape(column <= columns_of(self.length, n), (1, n, self.columns))
        return seen if self.mask is None else seen & self.mask[:, None, :]

    def place(self, n: int) -> Array:
        """(B, n) or (n,): the place of each of the next `n` tokens, where columns are fixed."""
        xp = array_namespace(self.length)
        if self.mask is None:
            return xp.reshape(columns_of(self.length, n), (n,))
        tokens = xp.astype(self.seen(n), self.length.dtype)
        return xp.sum(tokens, axis=2, dtype=self.length.dtype) - 1

    def shorter(self, n: int) -> Array:
        """The length without the last `n` tokens, where columns are fixed."""
        return array_namespace(self.length).asarray(self.length - n, device=device(self.length))

    def grown(self, past: Sequence[Past], kept: Array | None, tokens: Array) -> State:
        """With `tokens` (B, T) more, whose mask is in kept, and the past that has them."""
        if self.is_fixed:
            past, kept = tuple(own._replace(at=None) for own in past), self.mask
        ids = self.ids
        if self.rope_length is not None:
            # A copy, even of the first tokens: a caller may write over an array of ids.
            read = tokens[:, :0] if ids is None else ids
            ids = array_namespace(tokens).concat([read, tokens], axis=1)
        return self._replace(past=past, mask=kept, length=self.length + tokens.shape[1], ids=ids)

    def rows(self, ids: Array) -> State:
        """These texts of the batch, in this order: ids (B',)."""
        past = tuple(past.rows(ids) for past in self.past)
        mask, own = (
            None if a is None else array_namespace(a).take(a, ids, axis=0)
            for a in (self.mask, self.ids)
        )
        return self._replace(past=past, mask=mask, ids=own)

    def padded(self, length: int) -> State:
        """The same texts in `length` columns, by more padding on their left or by less of it.

        For libraries that compile anew for every shape. Padding only may be taken away.
        """
        n = length - self.length
        k = next((past.k for past in self.past if past.k is not None), None)
        if n == 0 or k is None:
            return self
        xp = array_namespace(k)
        where: Any = {"dtype": xp.bool, "device": device(k)}
        ones, zeros = (partial(fill, **where) for fill in (xp.ones, xp.zeros))
        mask = ones((k.shape[0], self.length)) if self.mask is None else self.mask
        mask = mask[:, -n:] if n < 0 else xp.concat([zeros((k.shape[0], n)), mask], axis=1)
        ids = self.ids
        if ids is not None:
            before = xp.zeros((k.shape[0], max(n, 0)), dtype=ids.dtype, device=device(ids))
            ids = xp.concat([before, ids[:, max(-n, 0) :]], axis=1)
        # A window that has dropped keys keeps what it has.
        past = [p if p.length < self.length else p.widened(n) for p in self.past]
        return self._replace(past=tuple(past), mask=mask, length=length, ids=ids)


def require_keep(mask: Array, tokens: Array) -> None:
    """TypeError, ValueError unless `mask` says of each of tokens (B, T) whether it is one."""
    require_mask("LanguageModel", "mask", mask, tokens)
    if tuple(mask.shape) != tuple(tokens.shape[:2]):
        raise ValueError(
            f"LanguageModel: mask must be (B, T) = {tuple(tokens.shape[:2])} like tokens, "
            f"got shape {tuple(mask.shape)}"
        )


def grown_mask(
    before: Array | None, mask: Array | None, tokens: Array, n_past: int
) -> Array | None:
    """The mask of a text and of the tokens after it; None where all are tokens."""
    if mask is not None:
        require_keep(mask, tokens)
    if before is None and mask is None:
        return None
    xp = array_namespace(tokens)

    def ones(n: int) -> Array:
        return xp.ones((tokens.shape[0], n), dtype=xp.bool, device=device(tokens))

    before = ones(n_past) if before is None else before
    return xp.concat([before, ones(tokens.shape[1]) if mask is None else mask], axis=1)


def counted(mask: Array) -> Array:
    """The place of each token among those that mask keeps; 0 for padding before the first."""
    xp = array_namespace(mask)
    seen = xp.cumulative_sum(as_indices(xp.astype(mask, xp.uint8)), axis=-1)
    return xp.maximum(seen - 1, xp.zeros_like(seen))
