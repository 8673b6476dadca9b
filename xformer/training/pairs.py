"""Pairs of sources and targets for an encoder-decoder, in batches of similar lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.dispatch.checks import require_sizes
from xformer.dispatch.subclasses import refusal
from xformer.training.batch import IGNORED, WIDTH, Batch, padded, spread
from xformer.training.shuffle import permuted, require_seed


class Bucket(NamedTuple):
    """Pairs of similar lengths, and the number of their batches."""

    members: np.ndarray  # indices of the pairs
    n_batches: int


class Pairs:
    """A `Source` of pairs of texts, for `EncoderDecoder.loss`: src, tgt, targets and src_mask.

    Pairs form a bucket if the length of their longer side, rounded up to a `multiple`, is the same.
    An epoch shuffles each bucket and cuts it into batches of similar size. It yields the batches of
    all buckets in random order. Every pair within max_len occurs once.

    sources: token ids of each source
    targets: token ids of each target, without bos_id and eos_id. The decoder reads bos_id and the
        target, and learns the target and eos_id. It needs no mask, since it is causal and padding
        is on the right. Padding in `targets` is `IGNORED`.
    batch_size: the most pairs of a batch; or
    max_tokens: the most slots of the longer side of a batch, including padding
    max_len: the most slots of either side; longer pairs are left out and counted in `left_out`
    multiple: lengths are padded to a multiple of it
    seed: of the random order

    ValueError if there is no pair, if a source is empty, and for numbers out of range.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        *,
        bos_id: int,
        eos_id: int,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        max_len: int | None = None,
        multiple: int = WIDTH,
        seed: int = 0,
    ) -> None:
        if (batch_size is None) == (max_tokens is None):
            raise ValueError("Pairs: must have either batch_size or max_tokens")
        options = {"batch_size": batch_size, "max_tokens": max_tokens, "max_len": max_len}
        limits = {name: size for name, size in options.items() if size is not None}
        multiple, *sizes = require_sizes("Pairs", 1, multiple=multiple, **limits)
        limits = dict(zip(limits, sizes, strict=True))
        bos_id, eos_id = require_sizes("Pairs", 0, bos_id=bos_id, eos_id=eos_id)
        seed = require_seed("Pairs", seed)
        if len(sources) != len(targets):
            raise ValueError(
                f"Pairs: sources and targets must be equally many, got {len(sources)}, "
                f"{len(targets)}"
            )
        self.bos_id, self.eos_id, self.seed, self.multiple = bos_id, eos_id, seed, multiple
        self.sources = [_ids("sources", i, ids) for i, ids in enumerate(sources)]
        self.targets = [_ids("targets", i, ids) for i, ids in enumerate(targets)]
        self.sizes = limits
        lengths = np.asarray(
            [max(len(s), len(t) + 1) for s, t in zip(self.sources, self.targets, strict=True)],
            np.int64,
        )
        fitting = np.flatnonzero(lengths <= limits.get("max_len", lengths.max(initial=0)))
        self.left_out = len(lengths) - len(fitting)
        if not len(fitting):
            raise ValueError(
                f"Pairs: at least one pair must be within max_len, got none of {len(lengths)}"
            )
        self.buckets = self._buckets(fitting, -(-lengths[fitting] // multiple) * multiple)
        self._ends = np.cumsum([bucket.n_batches for bucket in self.buckets])

    @property
    def per_epoch(self) -> int:
        """The number of batches of an epoch.

        Every pair occurs once in an epoch, except the pairs that `left_out` counts.
        """
        return int(self._ends[-1])

    def batch(self, i: int) -> Batch:
        """Batch i mod per_epoch of epoch i // per_epoch."""
        (i,) = require_sizes("Pairs.batch", 0, i=i)
        epoch, position = divmod(i, self.per_epoch)
        number = int(permuted(position, self.per_epoch, seed=self.seed, epoch=epoch))
        bucket, places = self._places(number)
        order = permuted(places, len(bucket.members), seed=self.seed, epoch=epoch)
        return self._batch(bucket.members[order])

    def held_out(self, n_batches: int | None = None) -> Iterator[Batch]:
        """All pairs in the order of their lengths. n_batches: at most this many, of all lengths."""
        for number in spread(self.per_epoch, n_batches):
            bucket, places = self._places(number)
            yield self._batch(bucket.members[places])

    def fingerprint(self) -> str:
        """The SHA-256 of bos_id, eos_id, seed, multiple, the sizes and all pairs, in hex."""
        digest = hashlib.sha256(
            f"pairs {self.bos_id} {self.eos_id} {self.seed} {self.multiple} {self.sizes}".encode()
        )
        for ids in (*self.sources, *self.targets):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i8").tobytes())
        return digest.hexdigest()

    def _buckets(self, indices: np.ndarray, widths: np.ndarray) -> list[Bucket]:
        buckets = []
        for width in np.unique(widths):
            members = indices[widths == width]
            size = self.sizes.get("batch_size") or self.sizes["max_tokens"] // int(width)
            if size == 0:
                raise ValueError(
                    f"Pairs: max_tokens must be at least {width}, the length of a pair, or max_len "
                    f"must exclude the pair, got {self.sizes['max_tokens']}"
                )
            buckets.append(Bucket(members, -(-len(members) // size)))
        return buckets

    def _places(self, number: int) -> tuple[Bucket, np.ndarray]:
        """The bucket of a batch, and the indices of its pairs in the bucket."""
        b = int(np.searchsorted(self._ends, number, side="right"))
        bucket = self.buckets[b]
        k = number - (int(self._ends[b]) - bucket.n_batches)
        n = len(bucket.members)  # sizes of batches differ by at most 1
        return bucket, np.arange(k * n // bucket.n_batches, (k + 1) * n // bucket.n_batches)

    def _batch(self, numbers: np.ndarray) -> Batch:
        rows = [self.targets[i] for i in numbers]
        src, src_mask = padded([self.sources[i] for i in numbers], multiple=self.multiple)
        tgt, _ = padded([np.append(self.bos_id, row) for row in rows], multiple=self.multiple)
        targets, mask = padded(
            [np.append(row, self.eos_id) for row in rows], IGNORED, multiple=self.multiple
        )
        n_targets = int(mask.sum())
        return Batch(
            (src, tgt, targets), {"src_mask": src_mask}, n_targets, n_targets + int(src_mask.sum())
        )


def _ids(name: str, i: int, ids: Any) -> np.ndarray:
    """The ids of a text as int64. TypeError, ValueError for others, and for an empty source."""
    if (why := refusal(type(ids))) is not None:
        raise TypeError(f"Pairs: {name}[{i}] must be (T,) integers, got {why}")
    array = np.asarray(ids if len(ids) else np.empty(0, np.int64))
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(f"Pairs: {name}[{i}] must be (T,) integers, got {ids!r:.60}")
    if name == "sources" and not len(array):
        raise ValueError(f"Pairs: sources[{i}] must hold at least one token, got none")
    return array.astype(np.int64)
