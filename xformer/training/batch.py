"""Batches, and the sources that make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

IGNORED = -1  # a target that the loss ignores
WIDTH = 8  # lengths are multiples of it, since JAX compiles for each length


class Batch(NamedTuple):
    """The arguments of a model's loss, on the host: loss(params, *arrays, **masks)."""

    arrays: tuple[np.ndarray, ...]
    masks: dict[str, np.ndarray]
    n_targets: int  # the loss is their mean
    n_tokens: int
    starts: bool = False  # of `Streams`: the first segments, after which the memory is empty


def as_batch(what: str, batch: Any) -> Batch:
    """`batch` if it has the fields of a `Batch`; of a plain tuple of arrays, the Batch of them.

    what: names it in the message. TypeError for anything else.
    """
    if all(hasattr(batch, name) for name in ("n_targets", "n_tokens")):
        return batch  # a user's loss may take another class
    arrays = batch if type(batch) is tuple else ()
    if not arrays or not all(isinstance(array, np.ndarray) for array in arrays):
        raise TypeError(
            f"{what} must be a training.Batch, or a tuple of NumPy arrays whose last one has the "
            f"targets, got {type(batch).__name__}"
        )
    return Batch(arrays, {}, arrays[-1].size, arrays[0].size)


class Source(Protocol):
    """Batches by their number, so that one integer is a run's position in its data.

    A source has no position and never ends. `Windows`, `Streams`, `Pairs` and `Rows` are sources.
    """

    @property
    def per_epoch(self) -> int:
        """The number of batches of an epoch, which reads all data once."""

    def batch(self, i: int) -> Batch:
        """Batch number i of an endless sequence. It depends only on the data, the seed and i.

        Its arrays are not written to later: caches refer to them until backward, and a step may
        have several batches. ValueError for i below 0.
        """

    def held_out(self, n_batches: int | None = None) -> Iterator[Batch]:
        """Batches to validate on, the same in every call.

        n_batches: at most this many, spread evenly over the data; None: all data in its order
        """

    def fingerprint(self) -> str:
        """A digest of the data, sizes and seed.

        A run can only be resumed with a source that has the same fingerprint.
        """


def padded(
    rows: Sequence[np.ndarray], fill: int = 0, multiple: int = WIDTH
) -> tuple[np.ndarray, np.ndarray]:
    """Padded ids (B, T), T a multiple of `multiple`, and their mask (B, T), True = a token.

    fill: the value of padding
    """
    lengths = np.asarray([len(row) for row in rows])
    mask = np.arange(-(-lengths.max() // multiple) * multiple) < lengths[:, None]
    ids = np.full(mask.shape, fill, np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask


def spread(n: int, count: int | None) -> Sequence[int]:
    """`count` of the numbers below n, evenly from the first to the last; None: all."""
    if count is None or count >= n:
        return range(n)
    return [round(x) for x in np.linspace(0, n - 1, count)]
