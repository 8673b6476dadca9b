"""numba's `sdpa`: as exact as the reference whatever it masks, and as far as it goes."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from test_numpy_sdpa import LENGTHS, WINDOWS, double, inputs, masks, results

from xformer import ops
from xformer.base.typing import Array
from xformer.layers.attention import merge_heads, split_heads

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import flash, matmul, single_op
from xformer.backends.numba.single_op import Eager

KERNEL = Eager(ops.sdpa, least=0)
LONG = [lengths for lengths in LENGTHS if lengths[0] >= 16]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        yield


def given_of(*args: Any, **how: Any) -> list[Any]:
    return inputs(*args, dtype="float32", **how)


def require_exact(given: list[Any], **options: Any) -> None:
    """Within twice the reference's distance from the reference in float64."""
    *arrays, _ = given
    assert KERNEL.unsupported(*arrays, **options) is None
    exact = results(ops.sdpa.reference, double(given), **options)
    plain, got = (results(run, given, **options) for run in (ops.sdpa.reference, KERNEL))
    assert got.keys() == exact.keys()
    for name, wanted in exact.items():
        assert got[name].shape == wanted.shape and got[name].dtype == np.float32, name
        off, off_plain = (np.max(np.abs(a[name] - wanted)) for a in (got, plain))
        rounding = 2 * np.finfo(np.float32).eps * np.max(np.abs(wanted))
        assert off <= 2 * off_plain + rounding, (name, off, off_plain, options)


def require_near(given: list[Any], **options: Any) -> None:
    """To the rounding of sums that cancel out."""
    exact = results(ops.sdpa.reference, double(given), **options)
    for name, array in results(KERNEL, given, **options).items():
        assert np.allclose(array, exact[name], rtol=1e-5, atol=1e-5), name


def beside_bytes(x: Array) -> Array:
    """With rows that are no whole number of elements apart."""
    rows = np.zeros((*x.shape[:3], 4 * x.shape[3] + 2), np.uint8)
    rows[..., :-2] = np.ascontiguousarray(x).view(np.uint8)
    return rows[..., :-2].view(np.float32)


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": (16, 32), "LOW": (16, 32), "COLUMNS": 24, "WIDE": 40}.items():
        monkeypatch.setattr(flash, name, value)
    monkeypatch.setattr(single_op, "_programs", {})


@pytest.mark.parametrize("tiles", ["one", "many"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LONG, ids=str)
def test_tiles_of_every_form(
    length: tuple[int, int], causal: bool, tiles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diagonals, windows and padding that cut tiles at all places, scores small and large."""
    windows = list(WINDOWS)
    if tiles == "many":  # where nothing is exactly 0, as one key's gradients are in one tile
        small_tiles(monkeypatch)
        windows.remove((0, 0))
    keys = masks(length)["keys"]
    for window, mask, size in itertools.product(windows, (None, keys, keys[1:]), (1, 30)):
        given = given_of((4, 2), length, size=size)
        require_exact(given, causal=causal, window=window, mask=mask)


@pytest.mark.parametrize("size", [1e-3, 1, 30, 300])
def test_scores_of_every_size(size: float) -> None:
    """At the sizes of a model, with threads; also where powers without a maximum do not fit."""
    for options in ({"causal": True}, {"mask": masks((192, 192))["keys"]}, {"scale": 0.7}):
        require_exact(given_of((6, 6), (192, 192), width=32, size=size), **options)


def test_scores_far_from_zero() -> None:
    """Of all queries, and of some: no maximum is taken off scores near 0."""
    for size, some in itertools.product(
        (-200.0, -85.0, -60.0, 60.0, 200.0), (slice(None), slice(50, 53))
    ):
        given = given_of((2, 2), (80, 80))
        q, k = given[:2]
        k[..., 0] = 1
        q[:, :, some, 0] = size * q.shape[3] ** 0.5
        require_exact(given, causal=True)


@pytest.mark.parametrize("low, narrow, high", [(0, 800, 1100), (7, 395, 400), (50, 20, 700)])
def test_narrow_tiles(low: int, narrow: int, high: int) -> None:
    """Wide ones up to where not all keys are seen by all, and from there on narrow ones."""
    for columns in (384, 60):
        ends = [low]
        while ends[-1] < high:
            ends.append(flash._end(ends[-1], columns, low, narrow, high))
        widths = np.diff(ends)
        assert ends[-1] == high and widths.min() > 0 and widths.max() <= columns
        if flash.NARROW:  # not on AMD's cores
            assert narrow in ends or narrow < low
            few = widths[np.array(ends[:-1]) >= narrow]
            assert few.max() <= (size := min(flash.NARROW, columns))
            assert len(few) == -(-(high - max(low, narrow)) // size)
    assert flash._end(low, high - low, low, narrow, high) == high  # all in one


@pytest.mark.parametrize("size", [1, 30])
def test_long_sequences(size: int) -> None:
    for window in (None, (900, None), (5, 5)):
        require_exact(given_of((2, 1), (700, 1300), batch=1, size=size), causal=True, window=window)


def test_one_key_has_all_the_weight() -> None:
    """Then probabilities are exactly 1, and gradients of scores exactly 0."""
    for length, options in (((40, 40), {"window": (0, 0)}), ((40, 1), {})):
        got = results(KERNEL, given_of((4, 2), length), **options)
        assert not got["dq"].any() and not got["dk"].any()


def test_arrays_in_every_layout() -> None:
    """As a layer passes them, such that no product can take them as they are, and read-only."""
    given = given_of((4, 2), (80, 90))
    wanted = results(KERNEL, given, causal=True)
    for lay_out in (
        lambda x: split_heads(merge_heads(x), x.shape[1]),
        lambda x: np.repeat(x, 2, axis=3)[..., ::2],
        lambda x: np.ascontiguousarray(x.T).T,
        lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
        lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
        beside_bytes,
    ):
        laid_out = [None if x is None else lay_out(x) for x in given]
        for name, array in results(KERNEL, laid_out, causal=True).items():
            assert np.allclose(array, wanted[name], rtol=1e-5, atol=1e-6), name
    same = [np.broadcast_to(x[:, :, :1], x.shape) for x in given[:2]]  # as a view of one row
    for arrays in ([same[0], *given[1:]], [given[0], same[1], *given[2:]]):
        require_near(arrays, causal=True)


@pytest.mark.parametrize("lengths", [(1, 20, 30), (5, 20, 1)], ids=str)
def test_axes_of_one_element_have_any_strides(lengths: tuple[int, int, int]) -> None:
    """Of a width, or of keys: NumPy calls such arrays contiguous."""
    width, t, s = lengths
    rng = np.random.default_rng(0)

    def view(n: int) -> Array:
        x = rng.normal(size=(2, 3, n, width)).astype(np.float32)
        if width == 1:
            return np.stack([x[..., 0], x[..., 0]], axis=3)[..., ::-2]
        return x if n > 1 else np.repeat(x, 3, axis=2)[:, :, ::-3]

    q, k, v, dctx = view(t), view(s), view(s), view(t)
    require_near([q, k, v, None, None, dctx])


def test_what_a_mask_hides_may_be_anything() -> None:
    """NaN or infinity in keys that nobody sees changes nothing."""
    mask = masks((80, 90))["keys"]
    given = given_of((4, 2), (80, 90))
    wanted = results(KERNEL, given, mask=mask)
    given[1] = np.where(np.moveaxis(mask, 3, 2), given[1], np.nan)
    got = results(KERNEL, given, mask=mask)
    assert np.array_equal(got["ctx"], wanted["ctx"])
    given[1] = np.where(np.moveaxis(mask, 3, 2), given[1], np.inf)
    assert np.array_equal(results(KERNEL, given, mask=mask)["ctx"], wanted["ctx"])


def test_windows_of_any_length() -> None:
    for length in ((80, 90), (90, 80)):
        for window in ((None, 2**63 - 1), (2**70, 3)):
            require_exact(given_of((4, 2), length), window=window)


def test_a_cache_may_be_read_only() -> None:
    """As of a file in memory."""
    given = given_of((4, 2), (80, 80))
    _, cache = KERNEL(*given[:-1])
    wanted = cache.backward(given[-1])
    held: list[Any] = []
    whole = pickle.dumps(cache, protocol=5, buffer_callback=held.append)
    again = pickle.loads(whole, buffers=[bytes(x) for x in held])
    assert not again.ctx.flags.writeable
    for one, other in zip(again.backward(given[-1])[:3], wanted[:3], strict=True):
        assert np.array_equal(one, other)


def test_heads_are_merged_without_a_copy() -> None:
    for heads in ((4, 4), (4, 2)):
        got = results(KERNEL, given_of(heads, (80, 80)))
        for name in ("ctx", "dq", "dk", "dv"):
            assert np.shares_memory(merge_heads(got[name]), got[name]), name


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_stays(which: int) -> None:
    """As many numbers of each result are NaN as of the reference."""
    given = given_of((4, 2), (80, 80))
    given[which][1, 1, 50, 3] = np.nan
    with np.errstate(invalid="ignore"):
        wanted = results(ops.sdpa.reference, given)
        got = results(KERNEL, given)
    assert [name for name, array in wanted.items() if not np.isnan(array).any()] in ([], ["dv"])
    for name, array in wanted.items():
        np.testing.assert_array_equal(np.isnan(got[name]), np.isnan(array), name)


def test_memory_grows_with_the_length_alone() -> None:
    """T = 4096 in 2 heads: probabilities would be 134 MB."""
    given = given_of((2, 1), (4096, 4096), batch=1)
    tracemalloc.start()
    try:
        results(KERNEL, given, causal=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * sum(a.nbytes for a in given if a is not None)


def test_the_same_on_any_number_of_threads() -> None:
    given = given_of((6, 3), (200, 200))
    first = results(KERNEL, given, causal=True)
    for n in (1, 2, 3):
        with threadpoolctl.threadpool_limits(n, user_api="blas"):
            again = results(KERNEL, given, causal=True)
        assert all(np.array_equal(array, again[name]) for name, array in first.items()), n


def test_without_a_product_that_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_of((4, 2), (80, 90))
    assert KERNEL.unsupported(*given[:-1]) is None
    assert KERNEL.unsupported(*double(given)[:-1]) == "only float32"
    monkeypatch.setattr(matmul, "NAMES", ("no_such_product",))
    monkeypatch.setattr(single_op, "_programs", {})
    matmul.sgemm.cache_clear()
    try:
        assert "run as Python" in str(KERNEL.unsupported(*given[:-1]))
    finally:
        matmul.sgemm.cache_clear()
