"""Tiles of attention scores: their queries and keys, their scores, and their dropout masks.

A part is some batch elements with some groups of heads. A tile is some queries (slice t) and some
keys (slice s) of a part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np

from xformer.backends.numpy.philox import words
from xformer.backends.numpy.threads import blocks, n_threads, scratch
from xformer.base.typing import Array
from xformer.ops._attention import SdpaOptions
from xformer.ops.random_bits import RandomKey

# Queries of a tile, at least and at most. With fewer, less work is wasted beyond the diagonal; with
# more, keys are read less often.
ROWS = (64, 256)
COLUMNS = 512  # keys of a tile, at most
TILE = 1 << 17  # scores of a tile, over all its heads; two tiles fit in a core's L2 cache
THREADED = 1 << 22  # multiplications; more are worth waking a thread for
FEW = 16  # fewer queries: keys are not copied. Fewer keys: one may have all the weight.
NARROW = 512  # keys; a tile of at most this many is masked whole, not in short pieces of its rows


def _vector_exp2() -> bool:
    """Return whether this NumPy has a SIMD `exp2` for float32 on this machine."""
    introspect = getattr(np.lib, "introspect", None)  # since NumPy 2.1
    if introspect is None:
        return False
    targets = introspect.opt_func_info(func_name="^exp2$", signature="float32")
    return "baseline" not in targets.get("exp2", {}).get("ff", {}).get("current", "baseline")


EXP2 = _vector_exp2()  # if it has one, exp2 takes half the time of exp


class Part(NamedTuple):
    """Batch elements b, key heads g and their query heads h, computed in one call."""

    b: slice
    g: slice  # of G key heads
    h: slice  # of H query heads

    @property
    def shared(self) -> int:
        """The number of query heads that share a key head, r = H / G."""
        return (self.h.stop - self.h.start) // (self.g.stop - self.g.start)


class Scores(NamedTuple):
    """The arrays and options that determine the scores of `sdpa`, and the order of its tiles."""

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    bias: Array | None  # four axes, which broadcast to (B, H, T, S)
    mask: Array | None  # boolean, four axes, which broadcast to (B, H, T, S); True: may attend
    options: SdpaOptions
    left: int | None  # keys before the query's own that it may attend to; None: all
    right: int | None  # keys after it; None: all

    def run(self, fn: Callable[[Part], None], width: int, independent: tuple[bool, bool]) -> None:
        """Call fn(part) for all parts, on several threads if that pays.

        width: multiplications for each score
        independent: whether parts of different batch elements can run at once, and whether parts
            of different groups can
        """
        (n_batch, n_heads, n_queries), n_groups = self.q.shape[:3], self.k.shape[1]
        size = n_batch * n_heads * n_queries * self.k.shape[2]
        if size <= TILE and size * width <= THREADED:
            fn(Part(slice(0, n_batch), slice(0, n_groups), slice(0, n_heads)))
            return
        threads = n_threads() if size * width > THREADED else 1
        lists: dict[tuple[int, int], list[Part]] = {}
        for part in self._parts(threads):
            key = part.b.start if independent[0] else 0, part.g.start if independent[1] else 0
            lists.setdefault(key, []).append(part)
        in_order = list(lists.values())  # the parts of one list run one after the other

        def piece(start: int, stop: int) -> None:
            for parts in in_order[start:stop]:
                for part in parts:
                    fn(part)

        blocks(piece, len(in_order), 1 if threads > 1 else max(1, len(in_order)))

    def _parts(self, threads: int) -> Iterator[Part]:
        """Yield parts with as many heads, then batch elements, as a tile holds.

        They are smaller if there would be fewer parts than threads.
        """
        n_batch, n_groups, n_keys = self.k.shape[:3]
        r = self.q.shape[1] // n_groups
        group = max(1, r * self.n_rows * min(COLUMNS, n_keys))  # scores of a tile of one group
        n_g = _even_size(n_groups, TILE // group, threads if n_batch < threads else 1)
        n_b = _even_size(n_batch, TILE // (group * n_groups), threads)
        for b in range(0, n_batch, n_b):
            for g in range(0, n_groups, n_g):
                end = min(g + n_g, n_groups)
                yield Part(slice(b, min(b + n_b, n_batch)), slice(g, end), slice(g * r, end * r))

    @property
    def n_rows(self) -> int:
        """The number of queries of a tile."""
        return min(max(ROWS[0], self.k.shape[2] // 8), ROWS[1], self.q.shape[2])

    @property
    def few_queries(self) -> bool:
        """Whether there are too few queries for copies of the keys to pay."""
        return self.q.shape[2] < FEW

    @property
    def whole(self) -> tuple[slice, slice]:
        """The slices t of all queries and s of all keys."""
        return slice(0, self.q.shape[2]), slice(0, self.k.shape[2])

    @property
    def few_keys(self) -> bool:
        """Whether the band allows every query fewer than FEW keys."""
        n_keys = self.k.shape[2]
        if self.left is not None and self.right is not None:
            n_keys = min(n_keys, self.left + self.right + 1)
        return n_keys < FEW

    def rows(self, part: Part) -> Iterator[tuple[slice, int, int]]:
        """Yield (t, low, high) from the last queries to the first.

        No query of the slice t may attend to a key outside [low, high).
        """
        n_queries, n_keys = self.q.shape[2], self.k.shape[2]
        ahead = n_keys - n_queries  # query i is aligned with key i + ahead
        first, end = self._unmasked_keys(part)
        for start in reversed(range(0, n_queries, self.n_rows)):
            stop, low, high = min(start + self.n_rows, n_queries), first, end
            if self.left is not None:
                low = max(low, start + ahead - self.left)
            if self.right is not None:
                high = min(high, stop + ahead + self.right)
            yield slice(start, stop), low, max(low, high)

    def _unmasked_keys(self, part: Part) -> tuple[int, int]:
        """Return (first, end) of the keys that a padding mask (B, 1, 1, S) allows in this part."""
        n_keys = self.k.shape[2]
        if self.mask is None or self.mask.shape[1:] != (1, 1, n_keys):
            return 0, n_keys
        allowed = np.flatnonzero(tile_of(self.mask, part).any(axis=(0, 1, 2)))
        return (int(allowed[0]), int(allowed[-1]) + 1) if allowed.size else (0, 0)

    def queries(self, part: Part, t: slice) -> Array:
        """Return the queries t as (b, g, r * t, K): the heads of a group become rows."""
        return fold(self.q[part.b, part.h, t], part)

    def factor(self, unit: float) -> float:
        """Return the factor of q k^T that `tile` expects: scale * unit, or scale / softcap."""
        scale, softcap = self.options.scale, self.options.softcap
        return scale * unit if softcap is None else scale / softcap

    def tile(
        self, queries: Array, keys: Array, part: Part, t: slice, s: slice, unit: float
    ) -> tuple[Array, Array | None]:
        """Return the scores of a tile times unit, (b, h, t, s), and the softcap's derivative there.

        queries: (b, g, r * t, K)   keys: (b, g, K, S); one of them multiplied by `factor(unit)`
        The scores are scratch memory. The derivative is None without a softcap.
        """
        shape, dtype = (*queries.shape[:3], s.stop - s.start), queries.dtype
        scores = np.matmul(queries, keys[..., s], out=scratch("scores", shape, dtype))
        scores = unfold(scores, part)
        derivative = None
        if self.options.softcap is not None:
            np.tanh(scores, out=scores)
            derivative = 1 - scores**2
            scores *= self.options.softcap * unit
        if self.bias is not None:
            scores += tile_of(self.bias, part, t, s) * unit
        return scores, derivative

    def forbid(self, x: Array, part: Part, t: slice, s: slice, value: float) -> None:
        """Set x (b, h, t, s) to `value`, 0 or -inf, for queries and keys that may not attend.

        x may be NaN there.
        """
        n, m = x.shape[2:]
        if self.mask is not None:
            allowed = tile_of(self.mask, part, t, s)
            if not allowed.all():
                np.copyto(x, value, where=~allowed)
        # The column of x that is aligned with the first query.
        first = t.start + self.k.shape[2] - self.q.shape[2] - s.start
        if self.right is not None and first + self.right + 1 < m:
            start = max(0, first + self.right + 1) if m > NARROW else 0
            _replace(x[..., start:], None, first + self.right - start, value)
        if self.left is not None and first + n - 1 - self.left > 0:
            stop = min(m, first + n - 1 - self.left) if m > NARROW else m
            _replace(x[..., :stop], first - self.left, None, value)

    def dropout_mask(self, part: Part, t: slice, s: slice) -> Array:
        """Return (b, h, t, s): 1 where dropout keeps a probability of the tile, else 0."""
        (n_heads, n_queries), n_keys = self.q.shape[1:3], self.k.shape[2]
        b, h, i = np.ogrid[part.b, part.h, t]
        starts = ((b * n_heads + h) * n_queries + i) * n_keys + s.start
        key = cast(RandomKey, self.options.dropout_key)
        random = words(key, starts.reshape(-1), s.stop - s.start)
        keep = random >= round(self.options.dropout_rate * 2**32)
        return keep.reshape(*starts.shape, -1).astype(self.q.dtype)


def columns(low: int, high: int) -> Iterator[slice]:
    """Return the slices s of the tiles' keys, which cover [low, high)."""
    return (slice(i, min(i + COLUMNS, high)) for i in range(low, high, COLUMNS))


def fold(x: Array, part: Part) -> Array:
    """Reshape x (b, h, t, .) to (b, g, r * t, .): a view if contiguous or r = 1, else a copy."""
    r = part.shared
    return x if r == 1 else x.reshape(x.shape[0], x.shape[1] // r, r * x.shape[2], x.shape[3])


def unfold(x: Array, part: Part) -> Array:
    """Reshape contiguous x (b, g, r * t, .) to a view (b, h, t, .): the inverse of `fold`."""
    r = part.shared
    return x if r == 1 else x.reshape(x.shape[0], x.shape[1] * r, x.shape[2] // r, x.shape[3])


def transposed(x: Array, scale: float, name: str) -> Array:
    """Return scale * x (b, g, S, .) as (b, g, ., S), in the scratch buffer `name`.

    BLAS is faster with this copy than with a transposed view.
    """
    b, g, s, k = x.shape
    return np.multiply(x.mT, scale, out=scratch(name, (b, g, k, s), x.dtype))


def _even_size(n: int, most: int, least_pieces: int) -> int:
    """Return the size of equal pieces of n, at most `most`, for at least `least_pieces` pieces."""
    pieces = max(-(-n // max(1, most)), min(n, least_pieces), 1)
    return max(1, -(-n // pieces))


def tile_of(x: Array, part: Part, *tile: slice) -> Array:
    """Return x, which broadcasts to (B, H, T, S), at a part and a tile: slices t, s or none."""
    return x[tile_index(x, part, *tile)]


def tile_index(x: Array, part: Part, *tile: slice) -> tuple[slice, ...]:
    """Return the index of `tile_of`: slice(None) for axes of x with length 1."""
    axes = zip(x.shape, (part.b, part.h, *tile), strict=False)
    return tuple(slice(None) if n == 1 else index for n, index in axes)


def _replace(x: Array, low: int | None, high: int | None, value: float) -> None:
    """Write `value`, 0 or -inf, to x except where row + low <= column <= row + high.

    Bit operations take as long as an addition, a third of the time of `copyto`.
    """
    inside, infinite = _band(*x.shape[2:], low, high, x.dtype)
    bits = x.view(inside.dtype)
    np.bitwise_and(bits, inside, out=bits)
    if value:
        np.bitwise_or(bits, infinite, out=bits)


@functools.lru_cache(maxsize=32)
def _band(
    n: int, m: int, low: int | None, high: int | None, dtype: np.dtype
) -> tuple[Array, Array]:
    """Return two integer arrays (n, m): masks for `&`, then for `|`, with the bits of an array.

    If row + low <= column <= row + high, they keep the bits of an element. Else `&` sets them to 0,
    and `|` then sets them to the bits of -inf.
    """
    column, row = np.arange(m), np.arange(n)[:, None]
    inside = (low is None or column >= row + low) & (high is None or column <= row + high)
    infinite = np.asarray(-np.inf, dtype).view(f"i{dtype.itemsize}")
    none = np.zeros_like(infinite)
    return np.where(inside, ~none, none), np.where(inside, none, infinite)
