"""Pairs of texts for an encoder-decoder: batches by length, each pair once, and their loss."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from truths import published

import xformer as xf
from xformer.training import Batch, Pairs, parallel
from xformer.training.batch import IGNORED

BOS, EOS = 1, 2
Ids = list[list[int]]


def texts(lengths: list[int], start: int = 3) -> Ids:
    """Texts of these lengths, of which each token is in one place only."""
    ends = np.cumsum(lengths) + start
    return [list(range(int(end) - n, int(end))) for n, end in zip(lengths, ends, strict=True)]


def pairs(lengths: list[tuple[int, int]], **options: Any) -> Pairs:
    sources, targets = (texts([pair[k] for pair in lengths]) for k in (0, 1))
    if "max_tokens" not in options:
        options.setdefault("batch_size", 4)
    return Pairs(sources, targets, bos_id=BOS, eos_id=EOS, **options)


def rows(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """What a batch holds, without its padding: source, decoder's input, targets."""
    src, tgt, targets = batch.arrays
    kept, counted = batch.masks["src_mask"], targets != IGNORED
    return [
        (s[k].tolist(), t[c].tolist(), y[c].tolist())
        for s, k, t, c, y in zip(src, kept, tgt, counted, targets, strict=True)
    ]


lengths_of = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(
    lengths=lengths_of,
    seed=st.integers(0, 2**64 - 1),
    multiple=st.integers(1, 9),
    size=st.one_of(
        st.tuples(st.just("batch_size"), st.integers(1, 9)),
        st.tuples(st.just("max_tokens"), st.integers(40, 200)),
    ),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_pair_once(
    lengths: list[tuple[int, int]], seed: int, multiple: int, size: tuple[str, int], epoch: int
) -> None:
    source = pairs(lengths, seed=seed, multiple=multiple, **dict([size]))
    n = source.per_epoch
    found = [source.batch(i) for i in range(epoch * n, (epoch + 1) * n)]
    expected = [
        (s, [BOS, *t], [*t, EOS])
        for s, t in zip(texts([a for a, _ in lengths]), texts([b for _, b in lengths]), strict=True)
    ]
    assert sorted(row for batch in found for row in rows(batch)) == sorted(expected)
    held_out = [row for batch in source.held_out() for row in rows(batch)]
    assert sorted(held_out) == sorted(expected)
    for batch in found:
        require_sound(batch, multiple, size)


def require_sound(batch: Batch, multiple: int, size: tuple[str, int]) -> None:
    src, tgt, targets = batch.arrays
    assert src.shape[0] == tgt.shape[0] and tgt.shape == targets.shape
    assert src.shape[1] % multiple == tgt.shape[1] % multiple == 0
    counted = targets != IGNORED
    assert not src[~batch.masks["src_mask"]].any() and not tgt[~counted].any()
    assert batch.n_targets == counted.sum()
    assert batch.n_tokens == counted.sum() + batch.masks["src_mask"].sum()
    widest = max(src.shape[1], tgt.shape[1])
    assert len(src) * (widest if size[0] == "max_tokens" else 1) <= size[1]


def test_a_batch_has_texts_of_about_one_length() -> None:
    rng = np.random.default_rng(0)
    lengths = [(int(n), int(n)) for n in rng.integers(1, 60, 500)]
    for batch in (source := pairs(lengths, multiple=8)).held_out():
        longest = [max(len(s), len(t)) for s, t, _ in rows(batch)]
        assert max(longest) - min(longest) < 8
    widths = [source.batch(i).arrays[0].shape[1] for i in range(source.per_epoch)]
    assert widths != sorted(widths) and len(set(widths)) == 8  # all lengths, not one by one


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(10)))
def test_a_batch_does_not_depend_on_those_before_it(order: list[int]) -> None:
    lengths = [(n % 7 + 1, n % 5) for n in range(23)]
    source = pairs(lengths, seed=5)
    found = {i: source.batch(i) for i in order}
    for i in range(10):
        assert rows(found[i]) == rows(pairs(lengths, seed=5).batch(i))


def test_seeds_and_epochs_have_other_orders() -> None:
    lengths = [(5, 5)] * 40
    source, other = pairs(lengths, seed=5), pairs(lengths, seed=6)
    epochs = [
        [rows(s.batch(10 * e + k)) for k in range(10)] for s in (source, other) for e in (0, 1)
    ]
    assert all(epochs[a] != epochs[b] for a in range(4) for b in range(a))
    # Other pairs meet in a batch, not only other batches.
    together = [{frozenset(s[0] for s, *_ in batch) for batch in epoch} for epoch in epochs]
    assert all(together[a] != together[b] for a in range(4) for b in range(a))


def test_long_pairs_are_left_out_and_counted() -> None:
    source = pairs([(3, 3), (9, 2), (2, 8), (8, 7)], max_len=8, multiple=1)
    assert source.left_out == 2  # the end of a target takes a place too
    kept = sorted(len(s) for batch in source.held_out() for s, *_ in rows(batch))
    assert kept == [3, 8]


def test_some_held_out_batches_are_of_all_lengths() -> None:
    source = pairs([(n, n) for n in range(1, 41)], batch_size=1, multiple=1)
    some = [batch.arrays[0].shape[1] for batch in source.held_out(3)]
    assert some[0] == 1 and some[2] == 40 and 15 < some[1] < 25


def test_the_loss_is_the_mean_over_the_targets() -> None:
    """Of a batch: that of its pairs, one by one, without padding, weighed by their targets."""
    lengths = [(3, 5), (6, 2), (1, 0), (7, 7)]
    source = pairs(lengths, batch_size=4)
    model = xf.Transformer(40, 40, 8, 2, 1, 1, 16)
    params = model.init(0, dtype="float64")
    batch = source.batch(0)
    together, _ = model.loss(params, *batch.arrays, **batch.masks, ignore_index=IGNORED)
    total = 0.0
    for src, tgt, targets in rows(batch):
        one = [np.asarray([ids]) for ids in (src, tgt, targets)]
        total += float(model.loss(params, *one)[0]) * len(targets)
    assert float(together) == pytest.approx(total / batch.n_targets, rel=1e-12)


def test_the_fingerprint_of_pairs() -> None:
    lengths = [(3, 5), (6, 2), (1, 4)]
    base = pairs(lengths).fingerprint()
    assert base == pairs(lengths).fingerprint()
    others = [
        pairs([*lengths, (1, 1)]),
        pairs([(3, 5), (6, 2), (2, 4)]),
        pairs(lengths, seed=1),
        pairs(lengths, batch_size=3),
        pairs(lengths, max_tokens=30),
        pairs(lengths, multiple=4),
        pairs(lengths, max_len=30),
    ]
    assert len({base, *(source.fingerprint() for source in others)}) == 8


@pytest.mark.parametrize(
    ("sources", "targets", "options", "message"),
    [
        ([[3]], [[3], [4]], {"batch_size": 1}, "must be equally many, got 1, 2"),
        ([], [], {"batch_size": 1}, "at least one pair must be within max_len, got none of 0"),
        ([[3, 3]], [[3]], {"batch_size": 1, "max_len": 1}, "within max_len, got none of 1"),
        ([[]], [[3]], {"batch_size": 1}, r"sources\[0\] must hold at least one token, got none"),
        ([[3]], [[3.5]], {"batch_size": 1}, r"targets\[0\] must be \(T,\) integers, got \[3.5\]"),
        ([["a"]], [[3]], {"batch_size": 1}, r"sources\[0\] must be \(T,\) integers, got \['a'\]"),
        ([[3]], [[3]], {}, "must have either batch_size or max_tokens"),
        ([[3]], [[3]], {"batch_size": 1, "max_tokens": 9}, "must have either"),
        ([[3]], [[3]], {"batch_size": 0}, "batch_size must be an int of at least 1, got 0"),
        ([[3]], [[3]], {"max_tokens": 7}, "max_tokens must be at least 8, .*, got 7"),
    ],
)
def test_bad_pairs_are_refused(
    sources: Any, targets: Any, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^Pairs: .*{message}"):
        Pairs(sources, targets, bos_id=BOS, eos_id=EOS, **options)


# Files


def test_parallel_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("eins\nzwei drei\r\n\nvier\u2028fünf".encode())
    (tmp_path / "b").write_bytes(b"one\ntwo three\nlost\nfour five\n")
    with gzip.open(tmp_path / "b.gz", "wb") as file:
        file.write((tmp_path / "b").read_bytes())
    expected = [("eins", "one"), ("zwei drei", "two three"), ("vier\u2028fünf", "four five")]
    for name in ("b", "b.gz"):
        assert parallel(tmp_path / "a", tmp_path / name) == expected


def test_multi30k_is_read() -> None:
    folder = published("multi30k")
    found = parallel(folder / "train.de.gz", folder / "train.en.gz")
    assert len(found) == 29_000 and found[0][1] == (
        "Two young, White males are outside near many bushes."
    )


def test_bad_parallel_files_are_refused(tmp_path: Path) -> None:
    for name, data in {
        "two": b"a\nb\n",
        "three": b"a\nb\nc\n",
        "blank": b"\n\n",
        "latin1": b"a\nsch\xf6n\n",
        "damaged.gz": gzip.compress(b"a\nb\n" * 1000)[:-12],
        "none.gz": b"a\nb\n",
    }.items():
        (tmp_path / name).write_bytes(data)
    for one, other, message in (
        ("two", "three", r"two and .*three must have the same number of lines, got 2 and 3"),
        ("two", "blank", "hold no pair of texts"),
        ("two", "latin1", r"latin1: line 2: must be UTF-8, .* position 3"),
        ("two", "damaged.gz", r"damaged\.gz: is damaged"),
        ("two", "none.gz", r"none\.gz: is damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            parallel(tmp_path / one, tmp_path / other)
    with pytest.raises(FileNotFoundError, match="absent"):
        parallel(tmp_path / "two", tmp_path / "absent")
