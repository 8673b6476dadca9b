"""Philox4x32-10: the published answers, the same bits everywhere, and dropout's use of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import xformer
from xformer import backends, ops
from xformer.backends import Backend
from xformer.ops.random_bits import RandomKey, philox, random_bits

# Counter, key, output: the known answers that come with the authors' Random123 library
# (doi:10.1145/2063384.2063405). The third input is the beginning of pi.
KNOWN = {
    "zeros": (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    "ones": (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
# Parts of every kind: none, small, with the highest bits set.
KEYS = (
    RandomKey(0),
    RandomKey(1, 2, 3),
    RandomKey(2**32 - 1, 5, 0),
    RandomKey(2**32, 0, 7),
    RandomKey(0x299F31D0A4093822, 0x80000001, 0xFFFFFFFF),
    RandomKey(2**64 - 1, 2**32 - 1, 2**32 - 1),
)


def plain(key: RandomKey, size: int) -> list[int]:
    """The same bits by Python's own integers, written down independently from the paper."""
    words: list[int] = []
    for block in range(-(-size // 4)):
        c = [block & 0xFFFFFFFF, block >> 32, key.site, key.step]
        k = [key.seed & 0xFFFFFFFF, key.seed >> 32]
        for _ in range(10):
            high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
            high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
            c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        words += c
    return words[:size]


def bits(library: Backend, key: RandomKey, size: int) -> np.ndarray:
    like = library.asarray([0.0], "float32")
    return library.to_numpy(random_bits(like, key=key, size=size))


@pytest.mark.parametrize("case", KNOWN)
def test_known_answers(library: Backend, case: str) -> None:
    counter, key, wanted = KNOWN[case]
    words = philox(tuple(library.asarray([c], "int64") for c in counter), key)
    assert [int(w[0]) for w in words] == list(wanted)


def test_known_answers_through_the_op(library: Backend) -> None:
    """The counter of zeros is the first block of seed 0, step 0, site 0."""
    _, _, wanted = KNOWN["zeros"]
    assert bits(library, RandomKey(0), 4).tolist() == list(wanted)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_same_bits_everywhere(library: Backend, key: RandomKey) -> None:
    wanted = plain(key, 9)
    for size in (0, 1, 3, 4, 5, 9):
        got = bits(library, key, size)
        assert got.dtype in (np.int64, np.uint32)
        assert got.tolist() == wanted[:size]


def test_every_kernel_gives_the_bits_of_the_reference(library: Backend) -> None:
    like = library.asarray([0.0], "float32")
    for key in KEYS:
        with xformer.reference_only():
            reference = library.to_numpy(random_bits(like, key=key, size=4097))
        assert reference.dtype == np.int64
        assert np.array_equal(bits(library, key, 4097), reference)


def test_place_of_the_bits(library: Backend) -> None:
    like = library.asarray([0.0], "float64")
    got = random_bits(like, key=RandomKey(3), size=5)
    assert type(got) is type(like)
    if library.name != "jax":  # JAX places arrays itself
        assert got.device == like.device
    assert tuple(got.shape) == (5,)


def test_streams_differ_in_every_part() -> None:
    keys = [(0,), (1,), (2**32,), (0, 1), (0, 2**31), (0, 0, 1), (0, 0, 2**31)]
    streams = {tuple(bits(backends.get(), RandomKey(*key), 8).tolist()) for key in keys}
    assert len(streams) == len(keys)
    assert RandomKey(5, 2, 3).at(4) == RandomKey(5, 2, 7)


@pytest.mark.parametrize(
    ("key", "size", "error", "message"),
    [
        (RandomKey(-1), 4, ValueError, r"key\.seed must lie in \[0, 2\^64\), got -1"),
        (
            RandomKey(2**64),
            4,
            ValueError,
            r"key\.seed must lie in \[0, 2\^64\), got 18446744073709551616",
        ),
        (RandomKey(0, -1), 4, ValueError, r"key\.step must lie in \[0, 2\^32\), got -1"),
        (RandomKey(0, 2**32), 4, ValueError, r"key\.step must lie in \[0, 2\^32\), got 4294967296"),
        (RandomKey(0, 0, -1), 4, ValueError, r"key\.site must lie in \[0, 2\^32\), got -1"),
        (
            RandomKey(0, 0, 2**32),
            4,
            ValueError,
            r"key\.site must lie in \[0, 2\^32\), got 4294967296",
        ),
        (RandomKey(1.5), 4, TypeError, r"key\.seed must be an int, got 1\.5"),
        (
            RandomKey(np.float64(3)),
            4,
            TypeError,
            r"key\.seed must be an int, got np\.float64\(3\.0\)",
        ),
        (7, 4, TypeError, r"key must be an xformer\.RandomKey, got int"),
        ((1, 2, 3), 4, TypeError, r"key must be an xformer\.RandomKey, got tuple"),
        (None, 4, TypeError, r"key must be an xformer\.RandomKey, got None"),
        (RandomKey(0), -1, ValueError, r"size must be an int of at least 0, got -1"),
        (RandomKey(0), 2.0, ValueError, r"size must be an int of at least 0, got 2\.0"),
    ],
)
def test_bad_arguments(library: Backend, key: Any, size: Any, error: type, message: str) -> None:
    like = library.asarray([0.0], "float32")
    with pytest.raises(error, match=f"^random_bits: {message}"):
        random_bits(like, key=key, size=size)


def test_bad_like() -> None:
    with pytest.raises(TypeError, match=r"^random_bits: like must be an array, got list$"):
        random_bits([0.0], key=RandomKey(0), size=4)


def test_bits_look_random() -> None:
    words = bits(backends.get(), RandomKey(11, 2, 5), 1 << 18)
    assert words.min() >= 0
    assert words.max() < 1 << 32
    n = words.size
    for bit in range(32):
        ones = int(((words >> bit) & 1).sum())
        assert abs(ones - n / 2) < 5 * math.sqrt(n) / 2, bit
    x = words / 2**32
    assert abs(x.mean() - 0.5) < 5 / math.sqrt(12 * n)
    for lag in (1, 2, 3, 4, 64):
        assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < 5 / math.sqrt(n), lag


# ---- Dropout ----


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_dropout_keeps_its_rate(rate: float) -> None:
    x = np.ones((500, 400))
    y, cache = ops.dropout(x, rate=rate, key=RandomKey(3, 1, 4))
    kept = float((y != 0).mean())
    assert abs(kept - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / x.size)
    assert np.allclose(y[y != 0], 1 / (1 - rate), rtol=1e-15)
    assert np.array_equal(cache.backward(x), y)  # backward draws the same mask again
    rows = (y != 0).mean(axis=1)
    assert rows.std() < 2 * math.sqrt(rate * (1 - rate) / x.shape[1])  # no row is singled out


def test_dropout_mask_is_the_same_everywhere(library: Backend) -> None:
    x = library.asarray(np.ones((7, 11)), "float32")
    wanted = [word >= round(0.3 * 2**32) for word in plain(RandomKey(5, 6, 7), 77)]
    y, cache = ops.dropout(x, rate=0.3, key=RandomKey(5, 6, 7))
    assert (library.to_numpy(y) != 0).ravel().tolist() == wanted
    dx = library.to_numpy(cache.backward(x))
    assert (dx != 0).ravel().tolist() == wanted


def test_dropout_at_the_ends(library: Backend) -> None:
    """Rates that round to no word or to all 2^32 of them: the threshold is no 32-bit number."""
    x = library.asarray(np.full((3, 5), 2.0), "float32")
    for rate in (0.0, 1e-12, 2.0**-34):
        y, cache = ops.dropout(x, rate=rate, key=RandomKey(0))
        assert np.array_equal(library.to_numpy(y), np.full((3, 5), 2.0, np.float32)), rate
        assert np.array_equal(library.to_numpy(cache.backward(x)), library.to_numpy(y))
    for rate in (1.0, 1 - 1e-12, 1 - 2.0**-34):
        y, cache = ops.dropout(x, rate=rate, key=RandomKey(0))
        assert np.array_equal(library.to_numpy(y), np.zeros((3, 5))), rate
        assert np.array_equal(library.to_numpy(cache.backward(x)), np.zeros((3, 5)))
        assert str(y.dtype).endswith("float32")
    y, _ = ops.dropout(x, rate=1 - 2.0**-32, key=RandomKey(0))  # one word of 2^32 keeps
    assert np.isfinite(library.to_numpy(y)).all()


def test_dropout_drops_what_is_not_finite() -> None:
    x = np.full(1000, np.nan)
    y, _ = ops.dropout(x, rate=0.5, key=RandomKey(1))
    assert np.array_equal(y == 0, ~np.isnan(y))
    assert 400 < (y == 0).sum() < 600
