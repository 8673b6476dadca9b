"""Keys and values of the tokens before, kept while a text grows."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace

from xformer.dispatch import overridable
from xformer.typing import Array


class Past(NamedTuple):
    """Keys, normalised and rotated, and values of one layer's tokens so far; at first none."""

    k: Array | None = None  # (B, G, S, K)
    v: Array | None = None  # (B, G, S, M)
    room: Any = None  # where a backend appends in place

    @property
    def length(self) -> int:
        """S, how many are kept."""
        return 0 if self.k is None else int(self.k.shape[2])

    def last(self, n: int) -> Past:
        """The last `n` alone: all that a window can see."""
        if self.k is None or self.v is None or self.length <= n:
            return self
        start = self.length - n
        return self._replace(k=self.k[:, :, start:, :], v=self.v[:, :, start:, :])

    def rows(self, ids: Array) -> Past:
        """These sequences of the batch, in this order: ids (B',). A copy."""
        if self.k is None or self.v is None:
            return self
        xp = array_namespace(self.k)
        return Past(xp.take(self.k, ids, axis=0), xp.take(self.v, ids, axis=0))


@overridable
def append(k: Array, v: Array, *, past: Past) -> Past:
    """`past` and after it k (B, G, T, K) and v (B, G, T, M). `past` itself stays what it was."""
    if past.k is None or past.v is None:
        return Past(k, v)
    xp = array_namespace(k)
    return Past(xp.concat([past.k, k], axis=2), xp.concat([past.v, v], axis=2))
