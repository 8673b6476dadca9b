"""Sources and targets for an encoder-decoder, in batches of about one length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.arrays import refusal
from xformer.checks import require_sizes
from xformer.training.batch import IGNORED, WIDTH, Batch, padded, spread
from xformer.training.shuffle import permuted, require_seed


class Bucket(NamedTuple):
    """Pairs of about one length, and the batches that they make."""

    members: np.ndarray  # numbers of the pairs
    n_batches: int


class Pairs:
    """A `Source` of pairs of texts: src, tgt, targets and src_mask of `EncoderDecoder.loss`.

    sources, targets: token ids of each text, as the encoder is to see them, and without the tokens
    around a target: the decoder reads bos_id and the target, and is to give the target and eos_id.
    The decoder needs no mask, since it is causal and padding stands on the right; targets that do
    not count are `IGNORED`.

    Pairs whose longer side, rounded up to a `multiple`, is the same are of one bucket. An epoch
    shuffles each bucket, cuts it into batches of about one size, and gives the batches of all in
    random order: every pair comes once. batch_size: the most pairs of a batch; or max_tokens: the
    most places of the longer side, padding included. max_len: the most places of either side;
    longer pairs are left out, and counted in `left_out`. ValueError where there is no pair, a
    source is empty, or the numbers do not fit.
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
        given = {name: size for name, size in options.items() if size is not None}
        multiple, *sizes = require_sizes("Pairs", 1, multiple=multiple, **given)
        given = dict(zip(given, sizes, strict=True))
        bos_id, eos_id = require_sizes("Pairs", 0, bos_id=bos_id, eos_id=eos_id)
        seed = require_seed("Pairs", seed)
        if len(sources) != len(targets):
            raise ValueError(
                f"Pairs: sources and targets must be as many, got {len(sources)}, {len(targets)}"
            )
        self.bos_id, self.eos_id, self.seed, self.multiple = bos_id, eos_id, seed, multiple
        self.sources = [_ids("sources", i, ids) for i, ids in enumerate(sources)]
        self.targets = [_ids("targets", i, ids) for i, ids in enumerate(targets)]
        self.sizes = given
        lengths = np.asarray(
            [max(len(s), len(t) + 1) for s, t in zip(self.sources, self.targets, strict=True)],
            np.int64,
        )
        kept = np.flatnonzero(lengths <= given.get("max_len", lengths.max(initial=0)))
        self.left_out = len(lengths) - len(kept)
        if not len(kept):
            raise ValueError(
                f"Pairs: there must be a pair that is kept, got none of {len(lengths)}"
            )
        self.buckets = self._buckets(kept, -(-lengths[kept] // multiple) * multiple)
        self._ends = np.cumsum([bucket.n_batches for bucket in self.buckets])

    @property
    def per_epoch(self) -> int:
        """Batches in which every pair has come once."""
        return int(self._ends[-1])

    def batch(self, i: int) -> Batch:
        """Batch i mod per_epoch of epoch i // per_epoch."""
        (i,) = require_sizes("Pairs.batch", 0, i=i)
        epoch, place = divmod(i, self.per_epoch)
        number = int(permuted(place, self.per_epoch, seed=self.seed, epoch=epoch))
        bucket, places = self._places(number)
        order = permuted(places, len(bucket.members), seed=self.seed, epoch=epoch)
        return self._batch(bucket.members[order])

    def held_out(self, n_batches: int | None = None) -> Iterator[Batch]:
        """All pairs in the order of their lengths; n_batches: as many batches, of all lengths."""
        for number in spread(self.per_epoch, n_batches):
            bucket, places = self._places(number)
            yield self._batch(bucket.members[places])

    def fingerprint(self) -> str:
        """SHA-256 of all pairs, the sizes and the seed."""
        digest = hashlib.sha256(
            f"pairs {self.bos_id} {self.eos_id} {self.seed} {self.multiple} {self.sizes}".encode()
        )
        for ids in (*self.sources, *self.targets):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i8").tobytes())
        return digest.hexdigest()

    def _buckets(self, kept: np.ndarray, widths: np.ndarray) -> list[Bucket]:
        found = []
        for width in np.unique(widths):
            members = kept[widths == width]
            size = self.sizes.get("batch_size") or self.sizes["max_tokens"] // int(width)
            if size == 0:
                raise ValueError(
                    f"Pairs: max_tokens must hold a pair of {width} places, or max_len leave it "
                    f"out, got {self.sizes['max_tokens']}"
                )
            found.append(Bucket(members, -(-len(members) // size)))
        return found

    def _places(self, number: int) -> tuple[Bucket, np.ndarray]:
        """The bucket of a batch, and where in it the batch lies."""
        b = int(np.searchsorted(self._ends, number, side="right"))
        bucket = self.buckets[b]
        k = number - (int(self._ends[b]) - bucket.n_batches)
        n = len(bucket.members)  # batches of one size, or one less
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
    """The ids of a text: integers, and of a source at least one."""
    if (why := refusal(type(ids))) is not None:
        raise TypeError(f"Pairs: {name}[{i}] must be (T,) integers, got {why}")
    array = np.asarray(ids if len(ids) else np.empty(0, np.int64))
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(f"Pairs: {name}[{i}] must be (T,) integers, got {ids!r:.60}")
    if name == "sources" and not len(array):
        raise ValueError(f"Pairs: sources[{i}] must hold at least one token, got none")
    return array.astype(np.int64)
