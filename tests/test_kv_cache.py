"""`append`: a past grows, and whoever holds an earlier one keeps it as it was."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from xformer.backends import Backend
from xformer.layers.kv_cache import KVCache, append


def keys(library: Backend, first: int, n: int, batch: int = 2) -> tuple:
    """Keys and values of `n` tokens, each with the number of its token in it."""
    numbers = np.arange(first, first + n, dtype=np.float64)[:, None]
    k, v = (np.broadcast_to(numbers + 0.5 * i, (batch, 3, n, 4 + i)).copy() for i in range(2))
    return library.asarray(k), library.asarray(v)


def numbers(library: Backend, kv_cache: KVCache) -> list[int]:
    """Which tokens a past holds."""
    k, v = library.to_numpy(kv_cache.k), library.to_numpy(kv_cache.v)
    assert (k == k[:1, :1, :, :1]).all() and (v == k[:1, :1, :, :1] + 0.5).all()
    return [int(n) for n in k[0, 0, :, 0]]


@pytest.mark.parametrize("steps", [(1,) * 10, (100, 1, 1, 70, 1), (3, 0, 2)])
def test_it_grows(library: Backend, steps: tuple[int, ...]) -> None:
    kv_cache, end = KVCache(), 0
    for n in steps:
        kv_cache = append(*keys(library, end, n), kv_cache=kv_cache)
        end += n
        assert kv_cache.length == end
        assert numbers(library, kv_cache) == list(range(end))


def test_an_earlier_past_can_be_continued_twice(library: Backend) -> None:
    """Prefix reuse: nobody writes over what another one holds."""
    common = append(*keys(library, 0, 5), kv_cache=KVCache())
    one = append(*keys(library, 100, 2), kv_cache=common)
    two = append(*keys(library, 200, 3), kv_cache=common)
    again = append(*keys(library, 110, 1), kv_cache=one)
    assert numbers(library, common) == [0, 1, 2, 3, 4]
    assert numbers(library, one) == [0, 1, 2, 3, 4, 100, 101]
    assert numbers(library, two) == [0, 1, 2, 3, 4, 200, 201, 202]
    assert numbers(library, again) == [0, 1, 2, 3, 4, 100, 101, 110]


def test_a_window_rolls(library: Backend) -> None:
    kv_cache = KVCache()
    for first in itertools.islice(itertools.count(), 300):
        kv_cache = append(*keys(library, first, 1), kv_cache=kv_cache.last(3))
    assert numbers(library, kv_cache) == [296, 297, 298, 299]
    assert kv_cache.last(9) is kv_cache


def test_rows_of_a_batch(library: Backend) -> None:
    k, v = (library.asarray(np.arange(6.0)[:, None, None, None] + np.zeros((1, 1, 2, 3))),) * 2
    kv_cache = append(k, v, kv_cache=KVCache()).rows(library.asarray([4, 0, 0]))
    assert library.to_numpy(kv_cache.k)[:, 0, 0, 0].tolist() == [4.0, 0.0, 0.0]
    grown = append(k[:3, ...], v[:3, ...], kv_cache=kv_cache)
    assert library.to_numpy(grown.v)[:, 0, :, 0].tolist() == [
        [4, 4, 0, 0],
        [0, 0, 1, 1],
        [0, 0, 2, 2],
    ]
    assert KVCache().rows(library.asarray([0])).length == 0
