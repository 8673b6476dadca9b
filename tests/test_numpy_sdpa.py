"""NumPy's `sdpa` where the registry's small cases do not come: many tiles, threads, large scores.

Against the reference in float64, to rounding; and in float32, with the reference's error beside it.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from libraries import slow_but

from xformer import RandomKey, ops
from xformer.backends.numpy import flash, tiles
from xformer.backends.numpy import sdpa as kernel
from xformer.base.typing import Array
from xformer.layers.attention import merge_heads, split_heads

KEY = RandomKey(2**40 + 5, 2, 1)
NAMES = ("ctx", "dq", "dk", "dv", "dbias", "dsinks")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        yield


def inputs(
    heads: tuple[int, int],
    length: tuple[int, int],
    *,
    batch: int = 2,
    width: int = 11,
    bias: tuple[int, ...] | None = None,
    sinks: bool = False,
    size: float = 1.0,
    dtype: str = "float64",
) -> list[Any]:
    """q, k, v, bias, sinks and dctx; scores have about that size."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape).astype(dtype)

    (h, g), (t, s) = heads, length
    return [
        normal(batch, h, t, width) * size,
        normal(batch, g, s, width),
        normal(batch, g, s, 13),
        None if bias is None else normal(*bias),
        normal(h) if sinks else None,
        normal(batch, h, t, 13),
    ]


def results(run: Any, given: list[Any], **options: Any) -> dict[str, Array]:
    *arrays, dctx = given
    ctx, cache = run(*arrays, **options)
    pairs = zip(NAMES, (ctx, *cache.backward(dctx)), strict=True)
    return {name: array for name, array in pairs if array is not None}


def require_same(given: list[Any], **options: Any) -> None:
    """As the reference in float64, but for the order of sums."""
    wanted = results(ops.sdpa.reference, given, **options)
    got = results(kernel.sdpa, given, **options)
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].shape == array.shape and got[name].dtype == array.dtype, name
        assert np.allclose(got[name], array, rtol=1e-11, atol=1e-12), (name, options)


def masks(shape: tuple[int, int]) -> dict[str, Array | None]:
    """Of keys, of pairs of a batch and a query that sees nothing, and none."""
    rng, (t, s) = np.random.default_rng(4), shape
    keys = np.ones((2, 1, 1, s), bool)
    keys[0, ..., : s // 3] = keys[1, ..., s // 2 :] = False
    pairs = rng.random((2, 1, t, s)) < 0.8
    pairs[1, :, t // 2] = False
    return {"none": None, "keys": keys, "pairs": pairs, "one": rng.random((t, s)) < 0.8}


LENGTHS = ((70, 130), (130, 70), (200, 200), (17, 90), (3, 300), (64, 64))
WINDOWS = (None, (3, None), (None, 2), (40, 20), (0, 0), (500, 500))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", slow_but({*LENGTHS} - {(200, 200)}, LENGTHS), ids=str)
def test_tiles_of_every_form(length: tuple[int, int], causal: bool) -> None:
    """Diagonals, windows and padding that cut tiles at all places, scores small and large."""
    for window, (name, mask), size in itertools.product(WINDOWS, masks(length).items(), (1, 30)):
        heads = (4, 2) if name in ("none", "keys") else (3, 3)
        given = inputs(heads, length, size=size)
        require_same(given, causal=causal, window=window, mask=mask)


@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_options_together(length: tuple[int, int]) -> None:
    for name, (softcap, rate, sinks, shape) in itertools.product(
        ("none", "keys", "pairs"),
        [(0.7, 0.0, False, (4, 1, 1)), (None, 0.3, True, (4, 1, 1)), (2.0, 0.3, True, (1, 1))],
    ):
        given = inputs((4, 2), length, bias=shape, sinks=sinks)
        drop = {"dropout_rate": rate, "dropout_key": KEY}
        mask = masks(length)[name]
        require_same(given, causal=True, window=(60, 3), mask=mask, softcap=softcap, **drop)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("size", [1, 30])
def test_more_keys_than_a_tile_has(size: int, sinks: bool, monkeypatch: Any) -> None:
    for module in (tiles, flash):
        monkeypatch.setattr(module, "COLUMNS", 48)
    for name, mask in masks((150, 200)).items():
        given = inputs((4, 2), (150, 200), size=size, sinks=sinks, bias=(4, 150, 200))
        require_same(given, mask=mask, causal=name != "one", dropout_rate=0.2, dropout_key=KEY)


@pytest.mark.parametrize("size", [1, 30])
def test_long_sequences(size: int) -> None:
    """Of more keys than a tile has, and so many that it has more queries."""
    for window in (None, (900, None), (5, 5)):
        given = inputs((2, 1), (700, 1300), batch=1, size=size)
        require_same(given, causal=True, window=window)


FULL = (2, 4, 70, 80)


@pytest.mark.parametrize("axes", list(itertools.product((False, True), repeat=4)), ids=str)
def test_gradients_of_a_bias_that_is_shared(axes: tuple[bool, ...], monkeypatch: Any) -> None:
    """By batch, heads, queries or keys: no thread adds where another one does."""
    monkeypatch.setattr(tiles, "TILE", 1)  # a part for each head of the keys
    monkeypatch.setattr(tiles, "THREADED", 0)
    add = flash._add_to_dbias

    def slowly(dbias: Array, dscores: Array, part: Any, t: slice, s: slice) -> None:
        here = dbias[tiles.tile_index(dbias, part, t, s)]
        before = here.copy()
        time.sleep(0.001)  # for another thread to add, which would be lost
        here[...] = before
        add(dbias, dscores, part, t, s)

    monkeypatch.setattr(flash, "_add_to_dbias", slowly)
    shape = tuple(1 if shared else n for n, shared in zip(FULL, axes, strict=True))
    given = inputs((4, 2), FULL[2:], bias=shape)
    require_same(given, causal=True)
    require_same([*given[:4], np.ones(4), given[5]])


def double(given: list[Any]) -> list[Any]:
    return [None if a is None else a.astype(np.float64) for a in given]


@pytest.mark.parametrize("size", [1e-3, 1, 30, 300])
def test_as_exact_as_the_reference(size: float) -> None:
    """In float32, at the sizes of a model, with threads; also where exponents do not fit."""
    for options in ({"causal": True}, {"mask": masks((192, 192))["keys"]}):
        given = inputs((6, 6), (192, 192), width=32, size=size, dtype="float32")
        exact = results(ops.sdpa.reference, double(given), **options)
        plain, got = (results(run, given, **options) for run in (ops.sdpa.reference, kernel.sdpa))
        for name, wanted in exact.items():
            off, off_plain = (np.max(np.abs(a[name] - wanted)) for a in (got, plain))
            rounding = 2 * np.finfo(np.float32).eps * np.max(np.abs(wanted))
            assert off <= 2 * off_plain + rounding, (name, off, off_plain)


@pytest.mark.parametrize("length", [(1, 300), (5, 90)], ids=str)
def test_few_queries_in_parts(length: tuple[int, int], monkeypatch: Any) -> None:
    monkeypatch.setattr(tiles, "TILE", 1)
    monkeypatch.setattr(tiles, "THREADED", 0)
    for name, mask in masks(length).items():
        given = inputs((4, 2), length, bias=(2, 4, 1, 1), sinks=name != "none")
        require_same(given, causal=True, mask=mask, softcap=0.7)


def test_scores_far_below_zero() -> None:
    """No maximum is taken off scores near 0; others must not vanish."""
    for shift in (-1e3, -50.0, 50.0, 1e3):
        given = inputs((2, 2), (80, 80), bias=(80, 80))
        given[3] = given[3] + shift
        require_same(given)
        given[3][40] -= shift  # of one query alone
        require_same(given)


def test_what_a_mask_hides_may_be_anything() -> None:
    """NaN or infinity in a key that nobody sees changes nothing."""
    mask = np.ones((2, 1, 1, 80), bool)
    mask[:, ..., 40:43] = False
    for length in ((80, 80), (5, 80)):
        given = inputs((4, 2), length)
        wanted = results(kernel.sdpa, given, mask=mask)["ctx"]
        for what in (np.nan, np.inf):
            given[1] = np.where(np.moveaxis(mask, 3, 2), given[1], what)
            with np.errstate(invalid="ignore"):
                assert np.array_equal(results(kernel.sdpa, given, mask=mask)["ctx"], wanted)


@pytest.mark.parametrize("length", [(80, 80), (5, 80), (5, 600), (300, 600)], ids=str)
@pytest.mark.parametrize("size", [1, 30])
def test_what_a_window_hides_may_be_anything(length: tuple[int, int], size: int) -> None:
    """NaN or infinity in a key changes only the queries that see it, in every form of a tile."""
    t, s = length
    key = s - t + 1  # of query 1
    for dtype in ("float32", "float64"):
        given = inputs((4, 2), length, size=size, dtype=dtype)
        for options, sees in (
            ({"causal": True}, np.arange(t) >= 1),
            ({"window": (1, 0)}, (np.arange(t) >= 1) & (np.arange(t) <= 2)),
        ):
            wanted = results(kernel.sdpa, given, **options)["ctx"]
            for what in (np.nan, np.inf):
                far = [*given]
                far[1] = given[1].copy()
                far[1][:, :, key] = what
                with np.errstate(invalid="ignore"):
                    got, _ = kernel.sdpa(*far[:-1], **options)
                assert np.isnan(got[:, :, sees]).all()
                tolerance = 1e-4 if dtype == "float32" else 1e-12
                pairs = got[:, :, ~sees], wanted[:, :, ~sees]
                np.testing.assert_allclose(*pairs, rtol=tolerance, atol=tolerance)


def test_one_key_has_all_the_weight() -> None:
    """Then probabilities are exactly 1, and gradients of scores exactly 0."""
    for length, options in (((40, 40), {"window": (0, 0)}), ((40, 1), {}), ((5, 1), {})):
        given = inputs((4, 2), length, dtype="float32")
        got = results(kernel.sdpa, given, **options)
        assert not got["dq"].any() and not got["dk"].any()


def test_dropout_drops_what_the_reference_drops() -> None:
    """With v the identity, ctx is what is left of the probabilities."""
    for s, t in ((80, 80), (83, 70), (65, 5)):  # rows that begin at a multiple of 4, or do not
        q, eye = np.zeros((2, 3, t, 4)), np.broadcast_to(np.eye(s), (2, 3, s, s))
        options: Any = {"dropout_rate": 0.4, "dropout_key": KEY, "causal": True}
        args = (q, np.zeros((2, 3, s, 4)), eye)
        ctx, wanted = (run(*args, **options)[0] for run in (kernel.sdpa, ops.sdpa.reference))
        assert np.array_equal(ctx == 0, wanted == 0)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_dropout_of_none_and_of_all(rate: float) -> None:
    for length in ((80, 80), (3, 80)):
        given = inputs((4, 2), length)
        require_same(given, dropout_rate=rate, dropout_key=KEY)


def test_arrays_in_every_layout() -> None:
    """As a layer passes them, and such that no product can take them as they are."""
    given = inputs((4, 2), (80, 90), dtype="float64")
    wanted = results(kernel.sdpa, given, causal=True)
    for lay_out in (
        lambda x: split_heads(merge_heads(x), x.shape[1]),
        lambda x: np.repeat(x, 2, axis=3)[..., ::2],
        lambda x: np.ascontiguousarray(x.T).T,
        lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
    ):
        laid_out = [None if x is None else lay_out(x) for x in given]
        for name, array in results(kernel.sdpa, laid_out, causal=True).items():
            assert np.allclose(array, wanted[name], rtol=1e-12, atol=1e-13), name


@pytest.mark.parametrize("length", [(80, 80), (1, 80), (5, 80)], ids=str)
def test_heads_are_merged_without_a_copy(length: tuple[int, int]) -> None:
    for heads in ((4, 4), (4, 2)):
        got = results(kernel.sdpa, inputs(heads, length))
        for name in ("ctx", "dq", "dk", "dv"):
            assert np.shares_memory(merge_heads(got[name]), got[name]), name


def test_memory_grows_with_the_length_alone() -> None:
    """T = 4096 in 2 heads: probabilities would be 134 MB."""
    given = inputs((2, 1), (4096, 4096), batch=1, dtype="float32")
    results(kernel.sdpa, given, causal=True)  # scratch memory, which stays
    tracemalloc.start()
    try:
        results(kernel.sdpa, given, causal=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * sum(a.nbytes for a in given if a is not None)


def test_the_same_in_every_run() -> None:
    given = inputs((6, 3), (200, 200), bias=(200, 200), sinks=True, dtype="float32")
    first, second = (results(kernel.sdpa, given, causal=True) for _ in range(2))
    assert all(np.array_equal(array, second[name]) for name, array in first.items())
