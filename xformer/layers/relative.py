"""T5's relative bias: a learned bias for each head and each bucket of distances."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import plain_numbers, require_shape, require_sizes
from xformer.initializers import Draw, normal
from xformer.layers.constant import constant
from xformer.ops._attention import aligned
from xformer.ops._pointwise import clip


@dataclass(frozen=True)
class RelativeConfig:
    """The configuration of a relative bias. ValueError for sizes that do not fit together.

    Half of the buckets of a direction hold one distance each. The other buckets hold more and more
    distances, up to max_distance; the last one holds all larger distances too.

    bidirectional: half of the buckets are for keys after the query. Otherwise these keys have the
        bucket of distance 0 (a causal mask excludes them).
    """

    n_heads: int
    n_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        plain_numbers(self)
        fewest = 4 if self.bidirectional else 2
        require_sizes("relative_bias", fewest, n_buckets=self.n_buckets)
        require_sizes("relative_bias", 1, n_heads=self.n_heads)
        require_sizes("relative_bias", self.n_exact + 1, max_distance=self.max_distance)

    @property
    def n_exact(self) -> int:
        """The number of buckets of a direction that hold one distance each."""
        return self._per_direction // 2

    @property
    def _per_direction(self) -> int:
        return self.n_buckets // 2 if self.bidirectional else self.n_buckets

    def init(self, rng: Generator, *, draw: Draw = normal) -> Array:
        """The initial table (N, H), by `draw`."""
        return draw(rng, (self.n_buckets, self.n_heads))

    def bucket(self, distance: int) -> int:
        """The bucket of a key `distance` positions after its query (before it: negative).

        With N buckets a direction, d = |distance| and n = n_exact: d if d < n, otherwise
        min(n + floor(log(d / n) / log(max_distance / n) * (N - n)), N - 1). The N buckets of keys
        after the query follow the N buckets of keys before it (arXiv:1910.10683, section 2.1).
        """
        n, last = self.n_exact, self._per_direction - 1
        first = self._per_direction if self.bidirectional and distance > 0 else 0
        d = abs(distance) if self.bidirectional else max(-distance, 0)
        if d < n:
            return first + d
        # Every step is in float32, as in T5's implementations: at the edge of a bucket, where the
        # logarithm is a whole number, rounding decides.
        ratio = _float32(math.log(_float32(d / n)))
        part = _float32(ratio / _float32(math.log(self.max_distance / n)))
        return first + min(n + int(_float32(part * (self._per_direction - n))), last)


def relative_bias(
    table: Array, *, n_queries: int, n_keys: int, config: RelativeConfig, at: Array | None = None
) -> tuple[Array, RelativeBiasCache]:
    """bias[0, h, i, j] = table[bucket(j - i), h], with i from S - T (arXiv:1910.10683, 2.1).

    table: (N, H)   bias: (1, H, T, S), for `ops.sdpa`; T = n_queries, S = n_keys
    at: integer array (), the first i; None: S - T, so that the last query is at the last key
    ValueError for negative sizes, and for a table that does not fit config.
    """
    sizes = {"n_queries": n_queries, "n_keys": n_keys}
    n_queries, n_keys = require_sizes("relative_bias", 0, **sizes)
    require_shape("relative_bias", "table", table, (config.n_buckets, config.n_heads))
    xp = array_namespace(table)
    key, query = aligned(table, n_queries, n_keys, at)
    # All distances of at least max_distance are in the last bucket.
    reach = min(config.max_distance, max(n_queries, n_keys))
    buckets = constant(table, of=_buckets, args=(config, reach))
    near = clip(key - query, -reach, reach) + reach  # (T, S)
    ids = xp.take(buckets, xp.reshape(near, (n_queries * n_keys,)), axis=0)
    rows, cache = ops.embedding(table, ids=xp.reshape(ids, (n_queries, n_keys)))  # (T, S, H)
    return xp.permute_dims(rows, (2, 0, 1))[None, ...], RelativeBiasCache(cache)


@short
class RelativeBiasCache(NamedTuple):
    """Saved by `relative_bias` for backward: the lookup's cache, with each pair's bucket.

    The bias is a copy of rows of the table, so its gradient needs no values.
    """

    embedding: Any  # of `ops.embedding`, with ids (T, S)

    def backward(self, dbias: Array) -> Array:
        """dtable: the sum of dbias over the pairs of each bucket."""
        n_queries, n_keys = self.embedding.ids.shape
        n_heads = self.embedding.table_shape[1]
        require_shape("relative_bias", "dbias", dbias, (1, n_heads, n_queries, n_keys))
        rows = array_namespace(dbias).permute_dims(dbias[0, ...], (1, 2, 0))
        return self.embedding.backward(rows)


@functools.lru_cache(maxsize=64)
def _buckets(config: RelativeConfig, reach: int) -> list[int]:
    """The buckets of the distances from -reach to reach, on the host."""
    return [config.bucket(distance) for distance in range(-reach, reach + 1)]


def _float32(x: float) -> float:
    return ctypes.c_float(x).value
