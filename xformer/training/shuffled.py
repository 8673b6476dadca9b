"""Shuffled examples, in batches that a function makes from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xformer.dispatch.checks import require_sizes
from xformer.training.batch import Batch, spread
from xformer.training.shuffle import permuted, require_seed

Make = Callable[[Sequence[Any], np.random.Generator], Batch]


class Rows:
    """A `Source` of examples, which are tuples of arrays and numbers.

    Every epoch has another order. A batch is within one epoch, so the last examples of an epoch may
    be left out.

    batch_size: at most the number of examples
    make: make(examples, rng) returns a batch; rng depends on the seed and the batch's number
    ValueError if there is no example.
    """

    def __init__(self, examples: Sequence[Any], batch_size: int, make: Make, seed: int = 0) -> None:
        (batch_size,) = require_sizes("Rows", 1, batch_size=batch_size)
        seed = require_seed("Rows", seed)
        if not len(examples):
            raise ValueError("Rows: there are no examples")
        self.examples, self.make, self.seed = examples, make, seed
        self.batch_size = min(batch_size, len(examples))

    @property
    def per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return len(self.examples) // self.batch_size

    def batch(self, i: int) -> Batch:
        """Batch i mod per_epoch of epoch i // per_epoch."""
        (i,) = require_sizes("Rows.batch", 0, i=i)
        epoch, k = divmod(i, self.per_epoch)
        places = np.arange(k * self.batch_size, (k + 1) * self.batch_size)
        order = permuted(places, len(self.examples), seed=self.seed, epoch=epoch)
        return self.make([self.examples[j] for j in order], np.random.default_rng([self.seed, i]))

    def held_out(self, n_batches: int | None = None) -> Iterator[Batch]:
        """All examples in order, in batches of about batch_size. n_batches: at most this many."""
        parts = np.array_split(np.arange(len(self.examples)), self.per_epoch)
        rng = np.random.default_rng(self.seed)
        for number in spread(len(parts), n_batches):
            yield self.make([self.examples[j] for j in parts[number]], rng)

    def fingerprint(self) -> str:
        """The SHA-256 of the number of examples, batch_size, seed and all examples, in hex."""
        digest = hashlib.sha256(f"rows {len(self.examples)} {self.batch_size} {self.seed}".encode())
        for example in self.examples:
            for part in map(np.asarray, example):
                digest.update(f"{part.dtype.str} {part.shape} ".encode() + part.tobytes())
        return digest.hexdigest()
