"""Windows of one long sequence of tokens, which may be larger than memory."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from xformer.dispatch.checks import require_sizes
from xformer.dispatch.subclasses import refusal
from xformer.training.batch import Batch
from xformer.training.shuffle import permuted, require_seed

STEP = 1 << 20  # tokens hashed at a time
RUNS = 1024  # the fingerprint of a large file has this many runs of this many tokens


class Windows:
    """A `Source` of windows of `length` tokens, with the next token of each as target.

    A batch has tokens (B, T) and targets (B, T), int64. An epoch cuts the text into adjacent
    windows and reads each once, in random order. Each epoch has another offset of the first window.
    A batch may contain windows of two epochs.

    tokens: (N,) integers, in memory or memory-mapped (`np.memmap`); a batch reads only its windows
    length: T
    batch_size: B
    seed: of the random order
    sha256: of the tokens, if known (`Corpus.sha256`); for the fingerprint

    TypeError unless tokens are integers, ValueError if they are fewer than length + 1.
    """

    def __init__(
        self,
        tokens: Any,
        length: int,
        batch_size: int,
        seed: int = 0,
        sha256: str | None = None,
    ) -> None:
        length, batch_size = require_sizes("Windows", 1, length=length, batch_size=batch_size)
        seed = require_seed("Windows", seed)
        _require_tokens(tokens, length)
        self.tokens, self.length, self.batch_size, self.seed = tokens, length, batch_size, seed
        self.sha256 = sha256
        # One window less than fits, so that an epoch may start at each offset of a window.
        self.n_windows = max(1, len(tokens) // length - 1)
        self.n_starts = len(tokens) - self.n_windows * length

    @property
    def per_epoch(self) -> int:
        """The number of batches of an epoch; the last one may have windows of the next epoch."""
        return -(-self.n_windows // self.batch_size)

    def batch(self, i: int) -> Batch:
        """Windows i B to (i + 1) B - 1 of the endless sequence of epochs."""
        (i,) = require_sizes("Windows.batch", 0, i=i)
        first = i * self.batch_size
        epochs, places = np.divmod(np.arange(first, first + self.batch_size), self.n_windows)
        order = permuted(places, self.n_windows, seed=self.seed, epoch=epochs)
        cycles, epochs = np.divmod(epochs, self.n_starts)  # each start once in a cycle of epochs
        starts = permuted(epochs, self.n_starts, seed=self.seed, epoch=cycles)
        return self.cut(starts + order * self.length)

    def held_out(self, n_batches: int | None = None) -> Iterator[Batch]:
        """The windows in order from the first token. The last batch may be smaller.

        n_batches: this many batches, of windows spread evenly over the text; they overlap if it is
            short
        """
        size, last = self.batch_size, len(self.tokens) - self.length - 1
        if n_batches is None:
            starts = np.arange(0, last + 1, self.length)
        else:
            (n_batches,) = require_sizes("held_out", 1, n_batches=n_batches)
            starts = np.linspace(0, last, n_batches * size).astype(np.int64)
        for i in range(0, len(starts), size):
            yield self.cut(starts[i : i + size])

    def fingerprint(self) -> str:
        """The SHA-256 of the number of tokens, length, batch_size, seed and the tokens, in hex.

        If `sha256` is known, it is used for the tokens. Otherwise all tokens are hashed, except if
        they are memory-mapped and more than 1,024^2: then 1,024 evenly spaced runs of 1,024 tokens
        are hashed, and changes between these runs are not detected.
        """
        about = f"windows {len(self.tokens)} {self.length} {self.batch_size} {self.seed}"
        tokens = self.sha256 or self._sampled()
        return hashlib.sha256(f"{about} {tokens}".encode()).hexdigest()

    def _sampled(self) -> str:
        """The SHA-256 of the tokens, the same for every dtype; of runs for a large mapped file."""
        n, digest = len(self.tokens), hashlib.sha256()
        is_large = getattr(self.tokens, "_mmap", None) is not None and n > RUNS**2
        starts = np.linspace(0, n - RUNS, RUNS).astype(np.int64) if is_large else range(0, n, STEP)
        for start in starts:
            run = self.tokens[start : start + (RUNS if is_large else STEP)]
            run = run.astype(_small(run))
            digest.update(f"{run.dtype.str} ".encode() + run.tobytes())
        self._let_go()
        return digest.hexdigest()

    def cut(self, starts: np.ndarray) -> Batch:
        """The batch of the windows that begin at the tokens `starts` (B,).

        It has inputs and targets (B, length). A target is the token after its input.
        """
        rows = np.asarray(self.tokens[starts[:, None] + np.arange(self.length + 1)], np.int64)
        self._let_go()
        n = len(starts) * self.length
        return Batch((rows[:, :-1], rows[:, 1:]), {}, n, n)

    def _let_go(self) -> None:
        """Free the pages of a mapped file from this process; they stay in the system's cache."""
        mapped = getattr(self.tokens, "_mmap", None)
        if mapped is None or self.tokens.flags.writeable:  # writes to it could be lost
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def _small(ids: np.ndarray) -> str:
    """The smallest dtype that can store all ids. Hashing 8 bytes an id takes twice as long."""
    low, high = int(ids.min()), int(ids.max())
    small = (d for d in ("<u1", "<u2", "<u4") if low >= 0 and high <= np.iinfo(d).max)
    return next(small, "<i8")


def _require_tokens(tokens: Any, length: int) -> None:
    """TypeError unless tokens are integers, ValueError unless they fill a window and one more."""
    why = refusal(type(tokens))
    if why or not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "ui":
        got = why or getattr(tokens, "dtype", type(tokens).__name__)
        raise TypeError(f"Windows: tokens must be a NumPy array of integers, got {got}")
    if tokens.ndim != 1:
        raise ValueError(f"Windows: tokens must be (N,), got shape {tokens.shape}")
    if len(tokens) <= length:
        raise ValueError(
            f"Windows: the text is too short: a window of {length} tokens needs {length + 1}, "
            f"got {len(tokens)}"
        )
