"""Keys and values of the tokens before, kept while a text grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from xformer.checks import require_sizes
from xformer.dispatch import overridable
from xformer.ops._pointwise import clip
from xformer.typing import Array

Window = tuple[int | None, int | None]


class Past(NamedTuple):
    """Keys, normalised and rotated, and values of one layer's tokens so far; at first none.

    at: where columns are fixed, some of them for tokens to come, that of the next token. A mask
    then hides those behind each token.
    """

    k: Array | None = None  # (B, G, S, K)
    v: Array | None = None  # (B, G, S, M)
    place: Any = None  # where a backend keeps k and v, and appends in place
    at: Array | None = None  # integer (); None: every column has its token

    @property
    def length(self) -> int:
        """S, how many are kept; where columns are fixed, how many there are."""
        return 0 if self.k is None else int(self.k.shape[2])

    def last(self, n: int) -> Past:
        """The last `n` alone: all that a window can see."""
        if self.k is None or self.v is None or self.length <= n:
            return self
        start = self.length - n
        k, v = self.k[:, :, start:, :], self.v[:, :, start:, :]
        place = None if self.place is None else self.place.narrowed(self, k, v)
        return self._replace(k=k, v=v, place=place)

    def widened(self, n: int) -> Past:
        """`n` columns of padding before the first; -n less of them where n is negative."""
        if self.k is None or self.v is None or n == 0:
            return self
        if n < 0:
            return Past(self.k[:, :, -n:, :], self.v[:, :, -n:, :])
        xp = array_namespace(self.k)

        def wider(a: Array) -> Array:
            shape = (*a.shape[:2], n, a.shape[3])
            return xp.concat([xp.zeros(shape, dtype=a.dtype, device=device(a)), a], axis=2)

        return Past(wider(self.k), wider(self.v))

    def in_columns(self, n: int, length: int) -> Past:
        """A copy in `n` columns, the last token kept in that before `length`; the others are 0."""
        if self.k is None or self.v is None:
            return self
        xp = array_namespace(self.k)

        def placed(a: Array) -> Array:
            kept = a[:, :, : min(length, a.shape[2]), :]

            def zeros(n: int) -> Array:
                shape = (*a.shape[:2], n, a.shape[3])
                return xp.zeros(shape, dtype=a.dtype, device=device(a))

            return xp.concat([zeros(length - kept.shape[2]), kept, zeros(n - length)], axis=2)

        return Past(placed(self.k), placed(self.v))

    def within(self, mask: Array, n: int) -> Array:
        """`mask` (..., T, S) of fixed columns, but for those more than `n` before a token's own."""
        if self.at is None or n >= self.length:
            return mask
        xp = array_namespace(mask)
        column = xp.arange(self.length, device=device(mask))
        return mask & (column >= columns_of(self.at, mask.shape[-2]) - n)

    def without(self, n: int, *, needs: int) -> Past:
        """All but the last `n`. ValueError where a window has not left the `needs` before them."""
        if self.k is None or self.v is None or n == 0:
            return self
        left = self.length - n
        if left < needs:
            raise ValueError(
                f"rewind: by {n} tokens, {needs} keys before them are needed, and a window has "
                f"left {max(left, 0)}; rewind by no more than the last extend added"
            )
        return Past(self.k[:, :, :left, :], self.v[:, :, :left, :])

    def rows(self, ids: Array) -> Past:
        """These sequences of the batch, in this order: ids (B',). A copy."""
        if self.k is None or self.v is None:
            return self
        xp = array_namespace(self.k)
        return Past(xp.take(self.k, ids, axis=0), xp.take(self.v, ids, axis=0))


def require_rows(tokens: Array, n_rows: int) -> None:
    """ValueError where tokens (B, T) do not continue the `n_rows` texts of a state."""
    if tokens.shape[0] != n_rows:
        raise ValueError(
            f"extend: tokens must have the batch size of the state, {n_rows}, got {tokens.shape[0]}"
        )


def columns_of(at: Array, n: int) -> Array:
    """The columns of `n` tokens from `at` on: (n, 1), or () of one token."""
    if n == 1:
        return at
    return (at + array_namespace(at).arange(n, device=device(at)))[:, None]


def rewound(
    past: Sequence[Past], windows: Sequence[Window | None], *, length: int, n: int
) -> tuple[Past, ...]:
    """Of each layer, the past of a text of `length` tokens without its last `n`.

    ValueError for n outside [0, length], or where a layer's window has dropped what is needed.
    """
    (n,) = require_sizes("rewind", 0, n=n)
    if n > length:
        raise ValueError(f"rewind: n must be at most the {length} tokens there are, got {n}")
    left = length - n
    pairs = zip(past, windows, strict=True)
    return tuple(
        own.without(n, needs=left if not w or w[0] is None else min(w[0], left)) for own, w in pairs
    )


@overridable(backward=False)
def append(k: Array, v: Array, *, past: Past) -> Past:
    """`past` and after it k (B, G, T, K) and v (B, G, T, M). `past` itself stays what it was.

    But with past.at: then k and v come in the columns from there on, which there must be, and a
    backend may write over the past's own arrays.
    """
    if past.k is None or past.v is None:
        return Past(k, v)
    xp = array_namespace(k)
    if past.at is not None:
        column, n = xp.arange(past.length, device=device(k)), k.shape[2]
        is_new = column[:, None] == past.at  # (S, 1)
        if n > 1:
            new = column - past.at  # which of k and v
            is_new = ((new >= 0) & (new < n))[:, None]
            k, v = (xp.take(a, clip(new, 0, n - 1), axis=2) for a in (k, v))  # (B, G, S, .)
        return past._replace(k=xp.where(is_new, k, past.k), v=xp.where(is_new, v, past.v))
    return Past(xp.concat([past.k, k], axis=2), xp.concat([past.v, v], axis=2))
