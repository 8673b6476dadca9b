"""Tiles of attention's scores: which there are, what they hold, and which of them dropout keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np

from xformer.backends.numpy.philox import words
from xformer.backends.numpy.threads import blocks, n_threads, scratch
from xformer.ops._attention import SdpaOptions
from xformer.ops.random_bits import RandomKey
from xformer.typing import Array

ROWS = (64, 256)  # queries of a tile: fewer do less beyond a diagonal, more read keys less often
COLUMNS = 512  # keys of a tile, at most
TILE = 1 << 17  # elements of a tile, over all its heads: two of them fit in a core's L2 cache
THREADED = 1 << 22  # multiplications that are worth waking a thread for
FEW = 16  # queries for which copies do not pay; keys of which one may have all the weight
NARROW = 512  # keys of a tile that is masked whole: faster than short pieces of its rows


def _vector_exp2() -> bool:
    """Whether this NumPy on this machine takes powers of 2 of a whole vector at once."""
    introspect = getattr(np.lib, "introspect", None)  # of NumPy 2.1
    if introspect is None:
        return False
    found = introspect.opt_func_info(func_name="^exp2$", signature="float32")
    return "baseline" not in found.get("exp2", {}).get("ff", {}).get("current", "baseline")


EXP2 = _vector_exp2()  # then they take half the time of powers of e


class Part(NamedTuple):
    """Batch elements and groups of heads that are taken on at once."""

    b: slice
    g: slice  # heads of the keys
    h: slice  # heads of the queries

    @property
    def shared(self) -> int:
        """How many heads of queries share one of the keys."""
        return (self.h.stop - self.h.start) // (self.g.stop - self.g.start)


class Scores(NamedTuple):
    """What the scores of `sdpa` are made of."""

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    bias: Array | None  # four axes, which broadcast to (B, H, T, S)
    mask: Array | None  # as bias
    options: SdpaOptions
    left: int | None  # of the band that the options allow
    right: int | None

    def run(self, fn: Callable[[Part], None], width: int, apart: tuple[bool, bool]) -> None:
        """fn(part) for all batch elements and groups; on threads, where K + M = `width` pays.

        apart: whether parts of different batch elements, and of different groups, may run at once.
        """
        (n_batch, n_heads, n_queries), n_groups = self.q.shape[:3], self.k.shape[1]
        size = n_batch * n_heads * n_queries * self.k.shape[2]
        if size <= TILE and size * width <= THREADED:
            fn(Part(slice(0, n_batch), slice(0, n_groups), slice(0, n_heads)))
            return
        threads = n_threads() if size * width > THREADED else 1
        lists: dict[tuple[int, int], list[Part]] = {}
        for part in self._parts(threads):
            place = part.b.start if apart[0] else 0, part.g.start if apart[1] else 0
            lists.setdefault(place, []).append(part)
        todo = list(lists.values())

        def piece(start: int, stop: int) -> None:
            for parts in todo[start:stop]:
                for part in parts:
                    fn(part)

        blocks(piece, len(todo), 1 if threads > 1 else max(1, len(todo)))

    def _parts(self, threads: int) -> Iterator[Part]:
        """As many heads as a tile holds, then as many batch elements; something for each thread."""
        n_batch, n_groups, n_keys = self.k.shape[:3]
        r = self.q.shape[1] // n_groups
        group = max(1, r * self.n_rows * min(COLUMNS, n_keys))  # elements
        n_g = _even(n_groups, TILE // group, threads if n_batch < threads else 1)
        n_b = _even(n_batch, TILE // (group * n_groups), threads)
        for b in range(0, n_batch, n_b):
            for g in range(0, n_groups, n_g):
                end = min(g + n_g, n_groups)
                yield Part(slice(b, min(b + n_b, n_batch)), slice(g, end), slice(g * r, end * r))

    @property
    def n_rows(self) -> int:
        """How many queries a tile has."""
        return min(max(ROWS[0], self.k.shape[2] // 8), ROWS[1], self.q.shape[2])

    @property
    def few_queries(self) -> bool:
        """Whether they are too few for copies of the keys to pay."""
        return self.q.shape[2] < FEW

    @property
    def everywhere(self) -> tuple[slice, slice]:
        """All queries and all keys."""
        return slice(0, self.q.shape[2]), slice(0, self.k.shape[2])

    @property
    def few_keys(self) -> bool:
        """Whether no query sees more than a few keys."""
        n_keys = self.k.shape[2]
        if self.left is not None and self.right is not None:
            n_keys = min(n_keys, self.left + self.right + 1)
        return n_keys < FEW

    def rows(self, part: Part) -> Iterator[tuple[slice, int, int]]:
        """Tiles' queries, the last first, and from which to which key they may see any."""
        n_queries, n_keys = self.q.shape[2], self.k.shape[2]
        ahead = n_keys - n_queries
        least, most = self._unpadded(part)
        for start in reversed(range(0, n_queries, self.n_rows)):
            stop, low, high = min(start + self.n_rows, n_queries), least, most
            if self.left is not None:
                low = max(low, start + ahead - self.left)
            if self.right is not None:
                high = min(high, stop + ahead + self.right)
            yield slice(start, stop), low, max(low, high)

    def _unpadded(self, part: Part) -> tuple[int, int]:
        """From which to which key a mask of keys alone lets anybody see."""
        n_keys = self.k.shape[2]
        if self.mask is None or self.mask.shape[1:] != (1, 1, n_keys):
            return 0, n_keys
        seen = np.flatnonzero(own(self.mask, part).any(axis=(0, 1, 2)))
        return (int(seen[0]), int(seen[-1]) + 1) if seen.size else (0, 0)

    def queries(self, part: Part, t: slice) -> Array:
        """(b, g, r * t, K): the heads of a group as more rows."""
        return fold(self.q[part.b, part.h, t], part)

    def factor(self, unit: float) -> float:
        """Of q k^T, for `tile` to make scores of, in that unit."""
        scale, cap = self.options.scale, self.options.softcap
        return scale * unit if cap is None else scale / cap

    def tile(
        self, queries: Array, keys: Array, part: Part, t: slice, s: slice, unit: float
    ) -> tuple[Array, Array | None]:
        """Scores (b, h, t, s), times unit; the slope of the softcap.

        queries (b, g, r * t, K), keys (b, g, K, S), one of them times `factor`.
        """
        shape, dtype = (*queries.shape[:3], s.stop - s.start), queries.dtype
        scores = np.matmul(queries, keys[..., s], out=scratch("scores", shape, dtype))
        scores = unfold(scores, part)
        slope = None
        if self.options.softcap is not None:
            np.tanh(scores, out=scores)
            slope = 1 - scores**2
            scores *= self.options.softcap * unit
        if self.bias is not None:
            scores += own(self.bias, part, t, s) * unit
        return scores, slope

    def forbid(self, x: Array, part: Part, t: slice, s: slice, what: float) -> None:
        """x = what, 0 or -inf, where a query may not attend: whatever is there, NaN perhaps."""
        n, m = x.shape[2:]
        if self.mask is not None:
            allowed = own(self.mask, part, t, s)
            if not allowed.all():
                np.copyto(x, what, where=~allowed)
        first = t.start + self.k.shape[2] - self.q.shape[2] - s.start  # the key of the first query
        if self.right is not None and first + self.right + 1 < m:
            start = max(0, first + self.right + 1) if m > NARROW else 0
            _replace(x[..., start:], None, first + self.right - start, what)
        if self.left is not None and first + n - 1 - self.left > 0:
            stop = min(m, first + n - 1 - self.left) if m > NARROW else m
            _replace(x[..., :stop], first - self.left, None, what)

    def kept(self, part: Part, t: slice, s: slice) -> Array:
        """1 where dropout keeps a probability of the tile, else 0: (b, h, t, s)."""
        (n_heads, n_queries), n_keys = self.q.shape[1:3], self.k.shape[2]
        b, h, i = np.ogrid[part.b, part.h, t]
        starts = ((b * n_heads + h) * n_queries + i) * n_keys + s.start
        key = cast(RandomKey, self.options.dropout_key)
        drawn = words(key, starts.reshape(-1), s.stop - s.start)
        kept = drawn >= round(self.options.dropout_rate * 2**32)
        return kept.reshape(*starts.shape, -1).astype(self.q.dtype)


def columns(low: int, high: int) -> Iterator[slice]:
    """Keys of the tiles."""
    return (slice(i, min(i + COLUMNS, high)) for i in range(low, high, COLUMNS))


def fold(x: Array, part: Part) -> Array:
    """(b, h, t, .) -> (b, g, r * t, .); a copy, where heads share keys and x is not contiguous."""
    r = part.shared
    return x if r == 1 else x.reshape(x.shape[0], x.shape[1] // r, r * x.shape[2], x.shape[3])


def unfold(x: Array, part: Part) -> Array:
    """(b, g, r * t, .) -> (b, h, t, .), of contiguous memory."""
    r = part.shared
    return x if r == 1 else x.reshape(x.shape[0], x.shape[1] * r, x.shape[2] // r, x.shape[3])


def transposed(x: Array, scale: float, name: str) -> Array:
    """scale * x (b, g, S, .) as (b, g, ., S): BLAS is faster with it than with a view."""
    b, g, s, k = x.shape
    return np.multiply(x.mT, scale, out=scratch(name, (b, g, k, s), x.dtype))


def _even(n: int, most: int, least_pieces: int) -> int:
    """The size of equal pieces of n, of at most `most` and at least 1."""
    pieces = max(-(-n // max(1, most)), min(n, least_pieces), 1)
    return max(1, -(-n // pieces))


def own(x: Array, part: Part, *rest: slice) -> Array:
    """What an array that broadcasts to (B, H, T, S) holds for a part, or for a tile of it."""
    return x[place(x, part, *rest)]


def place(x: Array, part: Part, *rest: slice) -> tuple[slice, ...]:
    """Where that is."""
    axes = zip(x.shape, (part.b, part.h, *rest), strict=False)
    return tuple(slice(None) if n == 1 else own for n, own in axes)


def _replace(x: Array, low: int | None, high: int | None, what: float) -> None:
    """Write `what`, 0 or -inf, to x except where row + low <= column <= row + high.

    Bit operations take as long as an addition would, and a third of the time of `copyto`.
    """
    inside, infinite = _band(*x.shape[2:], low, high, x.dtype)
    bits = x.view(inside.dtype)
    np.bitwise_and(bits, inside, out=bits)
    if what:
        np.bitwise_or(bits, infinite, out=bits)


@functools.lru_cache(maxsize=32)
def _band(
    n: int, m: int, low: int | None, high: int | None, dtype: np.dtype
) -> tuple[Array, Array]:
    """Two arrays of bits (n, m): set where row + low <= column <= row + high; -inf elsewhere."""
    column, row = np.arange(m), np.arange(n)[:, None]
    inside = (low is None or column >= row + low) & (high is None or column <= row + high)
    infinite = np.asarray(-np.inf, dtype).view(f"i{dtype.itemsize}")
    none = np.zeros_like(infinite)
    return np.where(inside, ~none, none), np.where(inside, none, infinite)
