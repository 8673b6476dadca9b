"""`append`: a past grows, and whoever holds an earlier one keeps it as it was."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from xformer.backends import Backend

from xformer.layers.past import Past, append


def keys(library: Backend, first: int, n: int, batch: int = 2) -> tuple:
    """Keys and values of `n` tokens, each with the number of its token in it."""
    numbers = np.arange(first, first + n, dtype=np.float64)[:, None]
    k, v = (np.broadcast_to(numbers + 0.5 * i, (batch, 3, n, 4 + i)).copy() for i in range(2))
    return library.asarray(k), library.asarray(v)


def numbers(library: Backend, past: Past) -> list[int]:
    """Which tokens a past holds."""
    k, v = library.to_numpy(past.k), library.to_numpy(past.v)
    assert (k == k[:1, :1, :, :1]).all() and (v == k[:1, :1, :, :1] + 0.5).all()
    return [int(n) for n in k[0, 0, :, 0]]


@pytest.mark.parametrize("steps", [(1,) * 10, (100, 1, 1, 70, 1), (3, 0, 2)])
def test_it_grows(library: Backend, steps: tuple[int, ...]) -> None:
    past, end = Past(), 0
    for n in steps:
        past = append(*keys(library, end, n), past=past)
        end += n
        assert past.length == end
        assert numbers(library, past) == list(range(end))


def test_an_earlier_past_can_be_continued_twice(library: Backend) -> None:
    """Prefix reuse: nobody writes over what another one holds."""
    common = append(*keys(library, 0, 5), past=Past())
    one = append(*keys(library, 100, 2), past=common)
    two = append(*keys(library, 200, 3), past=common)
    again = append(*keys(library, 110, 1), past=one)
    assert numbers(library, common) == [0, 1, 2, 3, 4]
    assert numbers(library, one) == [0, 1, 2, 3, 4, 100, 101]
    assert numbers(library, two) == [0, 1, 2, 3, 4, 200, 201, 202]
    assert numbers(library, again) == [0, 1, 2, 3, 4, 100, 101, 110]


def test_a_window_rolls(library: Backend) -> None:
    past = Past()
    for first in itertools.islice(itertools.count(), 300):
        past = append(*keys(library, first, 1), past=past.last(3))
    assert numbers(library, past) == [296, 297, 298, 299]
    assert past.last(9) is past


def test_rows_of_a_batch(library: Backend) -> None:
    k, v = (library.asarray(np.arange(6.0)[:, None, None, None] + np.zeros((1, 1, 2, 3))),) * 2
    past = append(k, v, past=Past()).rows(library.asarray([4, 0, 0]))
    assert library.to_numpy(past.k)[:, 0, 0, 0].tolist() == [4.0, 0.0, 0.0]
    grown = append(k[:3, ...], v[:3, ...], past=past)
    assert library.to_numpy(grown.v)[:, 0, :, 0].tolist() == [
        [4, 4, 0, 0],
        [0, 0, 1, 1],
        [0, 0, 2, 2],
    ]
    assert Past().rows(library.asarray([0])).length == 0
