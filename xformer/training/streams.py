"""Adjacent segments of one long sequence of tokens, for models with a segment memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from xformer.dispatch.checks import require_sizes
from xformer.training.batch import Batch
from xformer.training.windows import Windows


class Streams:
    """A `Source` of adjacent segments of `length` tokens, with the next token of each as target.

    The text is cut into B streams. Row b of a batch continues row b of the batch before, as
    `LanguageModel.segment_loss` needs it. An epoch reads each stream once, from its beginning; its
    first batch has `starts`. There is no random order, and so no seed.

    A batch has tokens (B, T) and targets (B, T), int64.

    tokens: (N,) integers, in memory or memory-mapped (`np.memmap`); a batch reads only its segments
    length: T
    batch_size: B
    sha256: of the tokens, if known (`Corpus.sha256`); for the fingerprint

    TypeError unless tokens are integers, ValueError if they are fewer than B T + 1.
    """

    def __init__(
        self, tokens: Any, length: int, batch_size: int, sha256: str | None = None
    ) -> None:
        self.windows = Windows(tokens, length, batch_size, sha256=sha256)
        self.length, self.batch_size = self.windows.length, self.windows.batch_size
        last = len(tokens) - 1  # it is a target only
        self.n_segments = last // self.batch_size // self.length
        if not self.n_segments:
            raise ValueError(
                f"Streams: the text is too short: {self.batch_size} streams of {self.length} "
                f"tokens need {self.batch_size * self.length + 1}, got {len(tokens)}"
            )
        self.starts = np.arange(self.batch_size) * (last // self.batch_size)

    @property
    def per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return self.n_segments

    def batch(self, i: int) -> Batch:
        """The next segment of each stream: segment i of the endless sequence of epochs."""
        (i,) = require_sizes("Streams.batch", 0, i=i)
        segment = i % self.n_segments
        batch = self.windows.cut(self.starts + segment * self.length)
        return batch._replace(starts=segment == 0)

    def held_out(self, n_batches: int | None = None) -> Iterator[Batch]:
        """The segments of all streams, from the first ones.

        n_batches: at most this many; the streams begin evenly over the text
        """
        if n_batches is not None:
            (n_batches,) = require_sizes("held_out", 1, n_batches=n_batches)
        return map(self.batch, range(min(n_batches or self.n_segments, self.n_segments)))

    def fingerprint(self) -> str:
        """The SHA-256 of the number of tokens, length, batch_size and the tokens, in hex."""
        return hashlib.sha256(f"streams {self.windows.fingerprint()}".encode()).hexdigest()
