"""Batches by their number: orders of epochs, windows of a text, rows; and what they take."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hanging import SECONDS
from hypothesis import given, settings
from hypothesis import strategies as st

from xformer.training import Batch, Pairs, Rows, Source, Windows
from xformer.training.batch import IGNORED, padded, spread
from xformer.training.shuffle import permuted

seeds = st.integers(0, 2**64 - 1)

# The order of an epoch


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 2**40))
def test_an_order_has_every_place_once(n: int, seed: int, epoch: int) -> None:
    order = permuted(np.arange(n), n, seed=seed, epoch=epoch)
    assert order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 2**62), seed=seeds, data=st.data())
def test_a_place_is_the_same_alone_and_among_others(n: int, seed: int, data: Any) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    epochs = data.draw(st.lists(st.integers(0, 9), min_size=len(places), max_size=len(places)))
    together = permuted(places, n, seed=seed, epoch=epochs)
    alone = [int(permuted(i, n, seed=seed, epoch=e)) for i, e in zip(places, epochs, strict=True)]
    assert together.tolist() == alone and min(alone) >= 0 and max(alone) < n
    by_epoch = {(i, e): o for i, e, o in zip(places, epochs, alone, strict=True)}
    assert len({(e, o) for (_, e), o in by_epoch.items()}) == len(by_epoch)


def test_all_orders_of_four_come_about_as_often() -> None:
    """24 orders in 24,000 epochs: a thousand each, with a standard deviation of 31."""
    places, epochs = np.tile(np.arange(4), 24_000), np.repeat(np.arange(24_000), 4)
    orders = permuted(places, 4, seed=1, epoch=epochs).reshape(-1, 4)
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == 24 and min(counts.values()) > 850 and max(counts.values()) < 1150


def test_an_order_is_as_scattered_as_a_random_one() -> None:
    n = 20_000
    order = permuted(np.arange(n), n, seed=5)
    # Of neighbours: a mean distance of n / 3, no correlation, and one expected to adjoin still.
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() / n - 1 / 3) < 0.01
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert (np.diff(order) == 1).sum() < 8
    other, seeded = permuted(np.arange(n), n, seed=5, epoch=1), permuted(np.arange(n), n, seed=6)
    assert (order == other).sum() < 8 and (order == seeded).sum() < 8


@pytest.mark.parametrize(
    ("i", "n", "seed", "message"),
    [
        (3, 3, 0, r"i must lie in \[0, 3\), got 3 to 3"),
        ([0, -1], 3, 0, r"i must lie in \[0, 3\), got -1 to 0"),
        (0, 0, 0, "n must be an int of at least 1, got 0"),
        (0, 1, -1, "seed must be an int of at least 0, got -1"),
        (0, 1, 2**64, "seed must be below 2.64, got 18446744073709551616"),
    ],
)
def test_impossible_orders_are_refused(i: Any, n: int, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^permuted: {message}$"):
        permuted(i, n, seed=seed)


# Windows


def epoch_of(source: Windows, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """All windows of an epoch, as tokens and targets, from batches that reach beyond it."""
    n, size = source.n_windows, source.batch_size
    rows = []
    for i in range(epoch * n // size, -(-(epoch + 1) * n // size)):
        tokens, targets = source.batch(i).arrays
        rows += [(i * size + j, tokens[j], targets[j]) for j in range(size)]
    return [(a, b) for place, a, b in rows if epoch * n <= place < (epoch + 1) * n]


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(2, 300),
    length=st.integers(1, 20),
    batch_size=st.integers(1, 9),
    seed=seeds,
    epoch=st.integers(0, 5),
)
def test_an_epoch_has_every_window_once(
    n: int, length: int, batch_size: int, seed: int, epoch: int
) -> None:
    if n <= length:
        return
    source = Windows(np.arange(n), length, batch_size, seed)
    windows = epoch_of(source, epoch)
    assert len(windows) == source.n_windows
    for tokens, targets in windows:
        assert np.array_equal(targets, tokens + 1)  # the text counts up: the token that follows
    targets = np.sort(np.concatenate([targets for _, targets in windows]))
    assert np.array_equal(targets, targets[0] + np.arange(len(targets)))  # adjoining, none twice
    assert targets[0] >= 1 and targets[-1] < n
    assert len(targets) >= n - 2 * length  # so much at most is left for other epochs


def test_epochs_begin_at_all_places_and_miss_no_token() -> None:
    source = Windows(np.arange(50), 7, 3, seed=2)
    targets = [np.concatenate([b for _, b in epoch_of(source, e)]) for e in range(8)]
    assert sorted(int(t.min()) for t in targets) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert set(np.concatenate(targets).tolist()) == set(range(1, 50))


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(12)), seed=seeds)
def test_a_batch_does_not_depend_on_those_before_it(order: list[int], seed: int) -> None:
    text = np.arange(200) % 97
    source = Windows(text, 8, 5, seed)
    found = {i: source.batch(i) for i in order}
    for i in range(12):
        fresh = Windows(text.copy(), 8, 5, seed).batch(i)
        for a, b in zip(found[i].arrays, fresh.arrays, strict=True):
            assert np.array_equal(a, b)


def test_a_batch_of_windows() -> None:
    source: Source = Windows(np.arange(100, dtype=np.uint8), 10, 4)
    batch = source.batch(3)
    assert [a.shape for a in batch.arrays] == [(4, 10), (4, 10)] and batch.masks == {}
    assert {a.dtype for a in batch.arrays} == {np.dtype(np.int64)}
    assert (batch.n_targets, batch.n_tokens) == (40, 40)
    assert source.per_epoch == 3  # of 9 windows


def test_seeds_and_epochs_have_other_orders() -> None:
    text = np.arange(10_000)
    first, other = (Windows(text, 10, 50, seed) for seed in (0, 1))
    assert not np.array_equal(first.batch(0).arrays[0], other.batch(0).arrays[0])
    orders = [[int(tokens[0]) // 10 for tokens, _ in epoch_of(first, e)] for e in (0, 1)]
    assert orders[0] != orders[1]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 200), length=st.integers(1, 12), size=st.integers(1, 7))
def test_held_out_windows_are_in_order(n: int, length: int, size: int) -> None:
    if n <= length:
        return
    source = Windows(np.arange(n), length, size, seed=3)
    found = list(source.held_out())
    targets = np.concatenate([batch.arrays[1].ravel() for batch in found])
    assert np.array_equal(targets, 1 + np.arange((n - 1) // length * length))
    assert sum(batch.n_targets for batch in found) == len(targets)
    for count in (1, 3):
        some = list(source.held_out(count))
        assert [batch.arrays[0].shape for batch in some] == [(size, length)] * count
        assert all(np.array_equal(*(b.arrays[1], b.arrays[0] + 1)) for b in some)
    assert int(some[0].arrays[0][0, 0]) == 0
    if size > 1:
        assert int(some[-1].arrays[1][-1, -1]) == n - 1


def test_the_fingerprint_is_of_what_decides_the_batches() -> None:
    text = np.arange(300) % 50
    base = Windows(text, 8, 4, 1).fingerprint()
    assert base == Windows(text.astype(np.uint8), 8, 4, 1).fingerprint()
    changed = text.copy()
    changed[123] += 1
    others = [
        Windows(changed, 8, 4, 1),
        Windows(text[:-1], 8, 4, 1),
        Windows(text, 9, 4, 1),
        Windows(text, 8, 5, 1),
        Windows(text, 8, 4, 2),
    ]
    assert len({base, *(source.fingerprint() for source in others)}) == 6


def test_the_fingerprint_of_a_long_text_is_of_all_of_it() -> None:
    long = np.zeros(3_000_000, np.uint8)
    base = Windows(long, 8, 4).fingerprint()
    for place in (0, 2_000, 2_999_999):
        long[place] = 1
        assert Windows(long, 8, 4).fingerprint() != base
        long[place] = 0
    assert Windows(long, 8, 4).fingerprint() == base


def test_the_fingerprint_of_a_mapped_file(tmp_path: Path) -> None:
    """Of its digest where that is known; else of runs all over it."""
    long = np.memmap(tmp_path / "a", np.uint8, "w+", shape=3_000_000)
    base = Windows(long, 8, 4).fingerprint()
    for place in (0, 1_500_000, 2_999_999):  # its ends, and a longer change in the middle
        long[max(place - 2000, 0) : place + 2000] = 1
        assert Windows(long, 8, 4).fingerprint() != base
        long[:] = 0
    told = [Windows(long, 8, 4, sha256=digest).fingerprint() for digest in ("a", "b")]
    assert len({base, *told}) == 3
    assert told[0] == Windows(long[:].copy(), 8, 4, sha256="a").fingerprint()


@pytest.mark.parametrize(
    ("tokens", "length", "error", "message"),
    [
        ([1, 2, 3], 1, TypeError, "tokens must be a NumPy array of integers, got list"),
        (np.zeros(9), 1, TypeError, "tokens must be a NumPy array of integers, got float64"),
        (np.zeros((9, 2), int), 1, ValueError, r"tokens must be \(N,\), got shape \(9, 2\)"),
        (np.zeros(0, int), 1, ValueError, "too short: a window of 1 tokens needs 2, got 0"),
        (np.zeros(1, int), 1, ValueError, "too short: a window of 1 tokens needs 2, got 1"),
        (np.zeros(64, int), 64, ValueError, "too short: a window of 64 tokens needs 65, got 64"),
        (np.zeros(9, int), 0, ValueError, "length must be an int of at least 1, got 0"),
        (np.zeros(9, int), 2.5, ValueError, "length must be an int of at least 1, got 2.5"),
    ],
)
def test_windows_of_nothing_are_refused(
    tokens: Any, length: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^Windows: .*{message}"):
        Windows(tokens, length, 2)


def test_impossible_batches_are_refused() -> None:
    source = Windows(np.arange(9), 2, 2)
    with pytest.raises(ValueError, match="i must be an int of at least 0, got -1"):
        source.batch(-1)
    with pytest.raises(ValueError, match="n_batches must be an int of at least 1, got 0"):
        list(source.held_out(0))
    with pytest.raises(ValueError, match="batch_size must be an int of at least 1, got 0"):
        Windows(np.arange(9), 2, 0)


# Larger than memory

BUDGET = """
import json, resource, sys
import numpy as np
import xformer as xf
from xformer.training import Windows

size = int(sys.argv[2])
tokens = np.memmap(sys.argv[1], "<u2", "r")
assert tokens.nbytes == size
budget = 1 << 28  # of private memory: an eighth of the file
resource.setrlimit(resource.RLIMIT_DATA, (budget, budget))

def resident():
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

source = Windows(tokens, 64, 256, seed=0)
model = xf.GPT(512, 1, 16, 2, 64)
params = model.init(0)
loss, cache = model.loss(params, *(a[:4] % 512 for a in source.batch(0).arrays))
grads = cache.backward()
source.fingerprint()
before, seen = resident(), 0
for i in range(300):
    seen += source.batch(i).n_tokens
for batch in source.held_out(20):
    seen += batch.n_tokens
print(json.dumps([before, resident(), seen]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
def test_a_file_larger_than_the_memory_that_may_be_used(tmp_path: Path) -> None:
    """2 GiB, sparse on the disk; what its pages take stays in the system's cache."""
    path, size = tmp_path / "train.bin", 2 << 30
    with path.open("wb") as file:
        file.truncate(size)
    command = [sys.executable, "-c", BUDGET, str(path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    before, after, seen = json.loads(done.stdout)
    assert seen == 320 * 256 * 64
    assert before < 400 << 20 and after - before < 8 << 20, (before, after)


def test_what_was_written_into_a_private_mapping_stays(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    np.zeros(5000, np.uint16).tofile(path)
    tokens = np.memmap(path, np.uint16, "c")
    tokens[:] = 7
    assert (Windows(tokens, 8, 4).batch(0).arrays[0] == 7).all() and (tokens == 7).all()


# Rows


def examples(n: int) -> list[tuple[np.ndarray, int]]:
    return [(np.arange(i + 1), i) for i in range(n)]


def make(rows: Any, rng: np.random.Generator) -> Batch:
    numbers = np.asarray([number for _, number in rows])
    return Batch((numbers, rng.random(len(rows))), {}, len(rows), sum(len(row) for row, _ in rows))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), size=st.integers(1, 50), seed=seeds, epoch=st.integers(0, 4))
def test_an_epoch_of_rows_has_none_twice(n: int, size: int, seed: int, epoch: int) -> None:
    source = Rows(examples(n), size, make, seed)
    whole = min(size, n)
    assert source.per_epoch == n // whole
    numbers = range(epoch * source.per_epoch, (epoch + 1) * source.per_epoch)
    seen = [source.batch(i).arrays[0].tolist() for i in numbers]
    assert all(len(batch) == whole for batch in seen)
    flat = list(itertools.chain(*seen))
    assert len(set(flat)) == len(flat) == n // whole * whole


def test_rows_come_in_another_order_each_epoch_and_the_rest_in_the_next() -> None:
    source = Rows(examples(7), 3, make, 4)
    epochs = [
        [int(i) for k in (0, 1) for i in source.batch(2 * e + k).arrays[0]] for e in range(20)
    ]
    assert len(set(map(tuple, epochs))) == 20
    assert set(itertools.chain(*epochs)) == set(range(7))


def test_what_is_drawn_for_a_batch_is_its_own() -> None:
    source = Rows(examples(6), 3, make, 4)
    a, b = source.batch(5).arrays[1], source.batch(6).arrays[1]
    assert np.array_equal(a, Rows(examples(6), 3, make, 4).batch(5).arrays[1])
    assert not np.array_equal(a, b)


def test_no_batch_is_written_over() -> None:
    """A cache refers to it until the backward, and a step may have several."""
    ids = [np.arange(1, n) for n in (5, 4, 6, 3, 5, 4)]
    for source in (
        Windows(np.arange(40), 4, 3),
        Rows(examples(6), 3, make, 4),
        Pairs(ids, ids, bos_id=1, eos_id=2, batch_size=2),
    ):
        first = source.batch(0)
        arrays = [*first.arrays, *first.masks.values()]
        before = [a.copy() for a in arrays]
        for later in (source.batch(0), source.batch(1), *source.held_out()):
            for own in (*later.arrays, *later.masks.values()):
                assert not any(np.shares_memory(own, a) for a in arrays)
        assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))


def test_held_out_rows_are_all_of_them_and_none_is_alone() -> None:
    source = Rows(examples(11), 3, make, 4)
    found = [batch.arrays[0].tolist() for batch in source.held_out()]
    assert list(itertools.chain(*found)) == list(range(11)) and min(map(len, found)) >= 3
    assert [b.arrays[0].tolist() for b in source.held_out(2)] == [found[0], found[-1]]
    once, twice = ([b.arrays[1].tolist() for b in source.held_out()] for _ in range(2))
    assert once == twice


def test_the_fingerprint_of_rows() -> None:
    base = Rows(examples(6), 3, make, 4).fingerprint()
    assert base == Rows(examples(6), 3, make, 4).fingerprint()
    changed = examples(6)
    changed[5][0][2] = 9
    others = [
        Rows(changed, 3, make, 4),
        Rows(examples(7), 3, make, 4),
        Rows(examples(6), 2, make, 4),
        Rows(examples(6), 3, make, 5),
    ]
    assert len({base, *(source.fingerprint() for source in others)}) == 5


def test_rows_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="Rows: there are no examples"):
        Rows([], 3, make)


# Padding


def test_padded_rows() -> None:
    ids, mask = padded([np.array([1, 2, 3]), np.array([4])], IGNORED, multiple=4)
    assert ids.tolist() == [[1, 2, 3, -1], [4, -1, -1, -1]]
    assert mask.tolist() == [[True, True, True, False], [True, False, False, False]]


def test_numbers_that_are_spread_evenly() -> None:
    assert list(spread(5, None)) == list(spread(5, 9)) == [0, 1, 2, 3, 4]
    assert list(spread(9, 3)) == [0, 4, 8] and list(spread(9, 1)) == [0]
