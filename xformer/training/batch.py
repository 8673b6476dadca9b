"""Batches of a model's arguments, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

IGNORED = -1  # in the place of a target that does not count
WIDTH = 8  # not of every length, since JAX compiles for each anew


class Batch(NamedTuple):
    """Arguments of a model's loss, on the host: loss(params, *arrays, **masks)."""

    arrays: tuple[np.ndarray, ...]
    masks: dict[str, np.ndarray]
    n_targets: int  # over which the loss is a mean
    n_tokens: int


class Source(Protocol):
    """Batches by their number: a run's place in its data is one integer.

    A source holds no position and is never used up. `Windows`, `Pairs` and `Rows` are such.
    """

    @property
    def per_epoch(self) -> int:
        """Batches in which everything has come once."""

    def batch(self, i: int) -> Batch:
        """Batch 0, 1, 2, ... without end: a function of the data, the seed and i, of nothing else.

        Its arrays are not written to later: caches refer to them until the backward, and a step
        may have several batches. ValueError for i below 0.
        """

    def held_out(self, n_batches: int | None = None) -> Iterator[Batch]:
        """Batches to measure on, the same at every call, without regard to the epoch.

        All of the data once, in its order; n_batches: at most as many, spread evenly over it.
        """

    def fingerprint(self) -> str:
        """A digest of what decides the batches: data, sizes, seed. A run goes on with no other."""


def padded(
    rows: Sequence[np.ndarray], fill: int = 0, multiple: int = WIDTH
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids side by side (B, T), T a `multiple`, and where they are (B, T)."""
    lengths = np.asarray([len(row) for row in rows])
    mask = np.arange(-(-lengths.max() // multiple) * multiple) < lengths[:, None]
    ids = np.full(mask.shape, fill, np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask


def spread(n: int, count: int | None) -> Sequence[int]:
    """`count` of the numbers below n, from first to last and evenly; all where it is None."""
    if count is None or count >= n:
        return range(n)
    return [round(place) for place in np.linspace(0, n - 1, count)]
