"""CUDA's `sdpa` where the registry's small cases do not come: many tiles, wide heads, few queries.

A tile has 128 or 64 queries going forward, 64 or 32 going back, of up to 32 keys.
"""

from __future__ import annotations

import itertools
from typing import Any

import cuda_shim
import numpy as np
import pytest
from devices import repeated
from libraries import ON_DEVICE, only

from xformer import RandomKey, explain, ops
from xformer.backends import Backend
from xformer.backends.cupy import sdpa as kernel
from xformer.backends.cupy.attention import packed
from xformer.backends.cupy.module import DRIVERS
from xformer.layers.attention import merge_heads

pytestmark = only(*ON_DEVICE)

Host = np.ndarray
KEY = RandomKey(2**40 + 5, 2, 1)
NAMES = ("ctx", "dq", "dk", "dv", "dbias", "dsinks")
FINE = {"float32": 8 * np.finfo(np.float32).eps, "float64": 1e-13}  # of the largest number


def inputs(
    length: tuple[int, int],
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (11, 13),
    batch: int = 1,
    bias: tuple[int, ...] | None = None,
    sinks: bool = False,
    size: float = 1.0,
) -> list[Any]:
    """q, k, v, bias, sinks and dctx, in numbers of float32; scores have about that size."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> Host:
        return rng.normal(size=shape).astype(np.float32)

    (h, g), (t, s), (k, m) = heads, length, widths
    return [
        normal(batch, h, t, k) * np.float32(size),
        normal(batch, g, s, k),
        normal(batch, g, s, m),
        None if bias is None else normal(*bias),
        normal(h) if sinks else None,
        normal(batch, h, t, m),
    ]


def results(run: Any, given: list[Any], **options: Any) -> dict[str, Any]:
    """ctx and the gradients of all that is given."""
    *arrays, dctx = given
    ctx, cache = run(*arrays, **options)
    pairs = zip(NAMES, (ctx, *cache.backward(dctx)), strict=True)
    return {name: array for name, array in pairs if array is not None}


def on_host(given: list[Any], dtype: str) -> list[Any]:
    return [None if a is None else a.astype(dtype) for a in given]


def on_device(library: Backend, given: list[Any], dtype: str) -> list[Any]:
    return [None if a is None else library.asarray(a) for a in on_host(given, dtype)]


def by_kernel(
    library: Backend, given: list[Any], dtype: str = "float32", **options: Any
) -> dict[str, Host]:
    mask = options.pop("mask", None)
    mask = None if mask is None else library.asarray(mask)
    arrays = on_device(library, given, dtype)
    names: list[str] = []

    def run() -> list[Any]:
        got = results(kernel.sdpa, arrays, mask=mask, **options)
        names[:] = got
        return list(got.values())

    got = repeated(library, run)
    return {name: library.to_numpy(a) for name, a in zip(names, got, strict=True)}


def require_exact(
    library: Backend, given: list[Any], dtypes: tuple[str, ...] = ("float32",), **options: Any
) -> None:
    """In float32 within twice the reference's error, in float64 to rounding."""
    exact, plain = (
        results(ops.sdpa.reference, on_host(given, dtype), **options)
        for dtype in ("float64", "float32")
    )
    for dtype in dtypes:
        got = by_kernel(library, given, dtype, **options)
        assert got.keys() == exact.keys()
        for name, wanted in exact.items():
            assert (got[name].shape, got[name].dtype.name) == (wanted.shape, dtype), name
            off_plain = np.max(np.abs(plain[name] - wanted)) if dtype == "float32" else 0
            # Gradients that nearly vanish are differences of numbers that do not.
            size = max(np.max(np.abs(wanted)), 1 if dtype == "float64" else 0)
            allowed = 2 * off_plain + FINE[dtype] * size
            off = np.max(np.abs(got[name] - wanted))
            assert off <= allowed, f"{name} {dtype}: {off:.1e}, reference {off_plain:.1e}"


def masks(length: tuple[int, int], batch: int) -> dict[str, Host | None]:
    """None, of keys, of pairs with a query that sees nothing, and one for all."""
    rng, (t, s) = np.random.default_rng(4), length
    keys = np.ones((batch, 1, 1, s), bool)
    keys[0, ..., : s // 3] = False
    pairs = rng.random((batch, 1, t, s)) < 0.8
    pairs[0, :, t // 2] = False
    return {"none": None, "keys": keys, "pairs": pairs, "one": rng.random((t, s)) < 0.8}


# ---- Sizes ----

LENGTHS = ((17, 31), (32, 64), (65, 33), (129, 32), (33, 97))


@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_lengths_around_tiles(library: Backend, length: tuple[int, int]) -> None:
    given = inputs(length, heads=(2, 1))
    for causal in (False, True):
        require_exact(library, given, ("float32", "float64"), causal=causal)


@pytest.mark.parametrize("widths", [(1, 1), (33, 20), (64, 64), (80, 96), (3, 129)], ids=str)
def test_widths(library: Backend, widths: tuple[int, int]) -> None:
    """Rows that can be accessed 16 bytes at a time, and rows that cannot."""
    given = inputs((20, 37), heads=(2, 2), widths=widths)
    require_exact(library, given, causal=True)


@pytest.mark.parametrize("widths", [(128, 128), (200, 256)], ids=str)
def test_widths_in_float64(library: Backend, widths: tuple[int, int]) -> None:
    require_exact(library, inputs((20, 37), heads=(1, 1), widths=widths), ("float64",))


def test_wider_heads_are_left_to_the_reference(library: Backend) -> None:
    given = on_device(library, inputs((3, 5), widths=(7, 257)), "float32")
    assert "heads are 257 wide, more than 256" in explain(ops.sdpa, *given[:3])
    results(ops.sdpa, given)


def test_nothing(library: Backend) -> None:
    """No batch, no queries, no keys, heads of no width."""
    for batch, length, widths in (
        (0, (3, 5), (2, 4)),
        (1, (0, 5), (2, 4)),
        (1, (3, 0), (2, 4)),
        (1, (3, 5), (0, 4)),
        (1, (3, 5), (2, 0)),
    ):
        for bias in ((4, 1, 1), (1, 1, length[1])):
            given = inputs(length, batch=batch, widths=widths, bias=bias, sinks=True)
            wanted = results(ops.sdpa.reference, on_host(given, "float64"))
            got = by_kernel(library, given, "float64")
            assert got.keys() == wanted.keys()
            for name, array in wanted.items():
                assert got[name].shape == array.shape, name
                assert np.allclose(got[name], array, rtol=1e-12, atol=1e-14), name


# ---- Options ----

WINDOWS = ((3, None), (None, 2), (0, 0), (9, 40), (500, 500))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_and_masks(library: Backend, window: Any) -> None:
    for length, causal in itertools.product(((40, 70), (70, 40)), (False, True)):
        for mask in masks(length, 2).values():
            given = inputs(length, batch=2, heads=(1, 1), widths=(4, 4))
            require_exact(library, given, ("float64",), causal=causal, window=window, mask=mask)


@pytest.mark.parametrize("length", [(40, 70), (70, 41), (5, 150)], ids=str)
def test_options_together(library: Backend, length: tuple[int, int]) -> None:
    every: Any = {"causal": True, "window": (60, 3), "scale": 0.17}
    for name, (softcap, rate, sinks, bias) in zip(
        ("none", "keys", "pairs", "one"),
        [
            (0.7, 0.0, False, (4, 1, length[1])),
            (None, 0.3, True, (2, 1, 1, 1)),
            (2.0, 0.3, True, (1, length[1])),
            (2.0, 0.3, False, (1, 4, length[0], 1)),
        ],
        strict=True,
    ):
        given = inputs(length, batch=2, bias=bias, sinks=sinks)
        drop = {"dropout_rate": rate, "dropout_key": KEY}
        mask = masks(length, 2)[name]
        dtypes = ("float32", "float64") if name == "pairs" else ("float64",)
        require_exact(library, given, dtypes, mask=mask, softcap=softcap, **every, **drop)


FULL = (2, 4, 35, 40)  # two tiles of queries and of keys, in float64


@pytest.mark.parametrize("axes", list(itertools.product((False, True), repeat=4)), ids=str)
def test_gradients_of_a_bias_that_is_shared(library: Backend, axes: tuple[bool, ...]) -> None:
    """By batch, heads, queries or keys."""
    shape = tuple(1 if shared else n for n, shared in zip(FULL, axes, strict=True))
    given = inputs(FULL[2:], batch=2, bias=shape, sinks=True, widths=(3, 2))
    require_exact(library, given, ("float64",), causal=True)


def test_a_bias_that_is_the_same_for_all_keys_has_no_gradient(library: Backend) -> None:
    got = by_kernel(library, inputs((20, 9), bias=(4, 20, 1)))
    assert got["dbias"].shape == (4, 20, 1) and not got["dbias"].any()


@pytest.mark.parametrize("size", [30, 3000])
def test_large_scores(library: Backend, size: float) -> None:
    require_exact(library, inputs((33, 70), size=size, sinks=True))


def test_one_key_has_all_the_weight(library: Backend) -> None:
    """Then probabilities are exactly 1, and gradients of scores exactly 0."""
    for length, options in (((40, 40), {"window": (0, 0)}), ((40, 1), {}), ((5, 1), {})):
        got = by_kernel(library, inputs(length), **options)
        assert not got["dq"].any() and not got["dk"].any()


def test_a_query_that_sees_nothing(library: Backend) -> None:
    """Because of the mask, of -inf in the bias, of T > S: 0, and gradient 0."""
    mask, bias = np.ones((40, 40), bool), np.zeros((40, 40), np.float32)
    mask[7], bias[9] = False, -np.inf
    given = inputs((40, 40), bias=(40, 40))
    given[3] = bias
    got = by_kernel(library, given, mask=mask)
    for name in ("ctx", "dq"):
        assert not got[name][:, :, [7, 9]].any() and got[name][:, :, 8].all()
    assert all(np.isfinite(a).all() for a in got.values())
    got = by_kernel(library, inputs((70, 20)), causal=True)
    assert not got["ctx"][:, :, :50].any() and not got["dq"][:, :, :50].any()


# ---- Dropout ----


@pytest.mark.parametrize("length", [(40, 28), (18, 31), (3, 30)], ids=str)
def test_dropout_drops_what_the_reference_drops(library: Backend, length: tuple[int, int]) -> None:
    """With v the identity, ctx is what is left of the probabilities; rows of any alignment."""
    t, s = length
    q, k = np.zeros((2, 3, t, 4)), np.zeros((2, 3, s, 4))
    eye = np.broadcast_to(np.eye(s), (2, 3, s, s))
    options: Any = {"dropout_rate": 0.4, "dropout_key": KEY}
    wanted, _ = ops.sdpa.reference(q, k, eye, **options)
    got, _ = kernel.sdpa(*(library.asarray(x) for x in (q, k, eye)), **options)
    assert np.array_equal(library.to_numpy(got) == 0, wanted == 0)


@pytest.mark.parametrize("rate", [0.0, 2.0**-33, 1 - 2.0**-32, 1.0])
def test_dropout_of_none_and_of_all(library: Backend, rate: float) -> None:
    given = inputs((20, 30), heads=(2, 1))
    require_exact(library, given, ("float64",), dropout_rate=rate, dropout_key=KEY)


# ---- Which tiles, which blocks ----


def test_tiles_that_a_block_does_not_see_have_no_part_in_it(library: Backend) -> None:
    given = inputs((100, 100), heads=(1, 1))
    given[1][:, :, 64:] = given[2][:, :, 64:] = np.nan
    got = by_kernel(library, given, "float64", causal=True)
    assert np.isfinite(got["ctx"][:, :, :64]).all() and np.isnan(got["ctx"][:, :, 64:]).all()
    assert np.isfinite(got["dq"][:, :, :64]).all()
    given = inputs((100, 100), heads=(1, 1))
    given[0][:, :, :32] = np.nan
    got = by_kernel(library, given, "float64", causal=True)
    assert np.isfinite(got["dk"][:, :, 32:]).all() and np.isnan(got["dk"][:, :, :32]).all()


class Behind(cuda_shim.Array):
    """`whole`, of which what lies before row `first` must not be touched."""

    def __init__(self, whole: Any, first: int) -> None:
        super().__init__(whole.host[:, :, first:])
        self.whole = whole

    @property
    def data(self) -> Any:
        return self.whole.data


@pytest.mark.parametrize(
    ("length", "window", "kernels", "names"),
    [
        ((40, 200), (10, 0), ("sdpa_forward", "sdpa_backward_queries"), (1, 2)),
        ((200, 40), (None, 0), ("sdpa_backward_keys",), (0, 5)),
    ],
    ids=("keys", "queries"),
)
def test_tiles_that_no_block_sees_are_not_read(
    stand_in: Backend, monkeypatch: Any, length: Any, window: Any, kernels: Any, names: Any
) -> None:
    """Keys before the first window, from 150 on; queries before 160, the first to see one."""
    given = on_device(stand_in, inputs(length, heads=(1, 1)), "float64")
    hidden = [given[n].data.ptr for n in names]
    launch, ran = DRIVERS[cuda_shim.Array].launch, []

    def part(arg: Any) -> Any:
        is_hidden = isinstance(arg, cuda_shim.Array) and arg.data.ptr in hidden
        return Behind(arg, 128) if is_hidden else arg

    def noted(
        source: Any, name: str, like: Any, grid: Any, block: Any, args: Any, *rest: Any
    ) -> None:
        if name in kernels:
            args = tuple(map(part, args))
            ran.append(name)
        launch(source, name, like, grid, block, args, *rest)

    monkeypatch.setattr(DRIVERS[cuda_shim.Array], "launch", noted)
    results(kernel.sdpa, given, window=window)
    assert tuple(ran) == kernels


@pytest.mark.parametrize("length", [(1, 300), (16, 129), (5, 256)], ids=str)
def test_keys_of_few_queries_are_split(
    library: Backend, launched: list[Any], length: tuple[int, int]
) -> None:
    n_splits = -(-length[1] // 128)
    for sinks, options in (
        (False, {"mask": masks(length, 2)["pairs"]}),
        (True, {"causal": True, "mask": masks(length, 2)["keys"]}),
        (True, {"window": (20, 0), "dropout_rate": 0.3, "dropout_key": KEY}),
    ):
        require_exact(library, inputs(length, batch=2, sinks=sinks), ("float64",), **options)
    grids = {name: grid for name, grid, _ in launched}
    assert grids["sdpa_forward"] == (2 * 4 * n_splits,)
    assert grids["sdpa_combine"] == (2 * 4 * length[0],)


def test_splits_are_few(library: Backend, launched: list[Any], monkeypatch: Any) -> None:
    """Of very many keys each has more of them."""
    lengths = (129, 128 * 64, 128 * 64 + 1, 128 * 1024)
    assert [kernel.split_of(n) for n in lengths] == [128, 128, 256, 2048]
    monkeypatch.setattr(kernel, "MAX_SPLITS", 2)
    for n_keys in (300, 513):
        launched.clear()
        require_exact(library, inputs((3, n_keys), sinks=True), ("float64",), causal=True)
        assert launched[0][:2] == ("sdpa_forward", (4 * 2,))


def test_the_same_in_every_run(library: Backend) -> None:
    """Blocks and threads come in another order each time."""
    for length in ((40, 50), (3, 150)):
        given = inputs(length, bias=(1, length[1]), sinks=True)
        first, second = (by_kernel(library, given, causal=True) for _ in range(2))
        assert all(np.array_equal(array, second[name]) for name, array in first.items())


# ---- How arrays lie ----


def test_heads_of_a_packed_product_are_not_copied(library: Backend, launched: list[Any]) -> None:
    """(B, T, 3, H, K): q, k and v by their strides, a gradient too; ctx merges without a copy."""
    xp, rng = library.xp, np.random.default_rng(1)
    product = library.asarray(rng.normal(size=(2, 20, 3, 3, 8)).astype(np.float32))
    q, k, v = (xp.permute_dims(product[:, :, i, ...], (0, 2, 1, 3)) for i in range(3))
    by_token = library.asarray(rng.normal(size=(2, 20, 3, 8)).astype(np.float32))
    dctx = xp.permute_dims(by_token, (0, 2, 1, 3))
    got = results(kernel.sdpa, [q, k, v, None, None, dctx])
    for name, _, args in launched:
        read = [x.data.ptr for x in args if isinstance(x, type(q))]
        assert {x.data.ptr for x in (q, k, v)} <= set(read), name
        assert name == "sdpa_forward" or dctx.data.ptr in read, name
    copies = [None if x is None else x.copy() for x in (q, k, v, None, None, dctx)]
    for name, array in results(kernel.sdpa, copies).items():
        assert np.array_equal(library.to_numpy(array), library.to_numpy(got[name])), name
    for name in ("ctx", "dq", "dk", "dv"):
        assert merge_heads(got[name]).data.ptr == got[name].data.ptr, name


def test_arrays_in_every_layout(library: Backend) -> None:
    """Views that begin anywhere, that go backwards, whose last axis is not contiguous."""
    given = on_host(inputs((20, 37), widths=(8, 12)), "float64")
    wanted = results(kernel.sdpa, on_device(library, given, "float64"), causal=True)

    def views(host: Host) -> list[Any]:
        wide = np.pad(host, [(0, 0)] * 3 + [(1, 3)])  # only its beginning is not aligned
        hosts = map(np.ascontiguousarray, (wide, host[:, :, ::-1], host.T))
        wide, behind, turned = map(library.asarray, hosts)  # CuPy would keep the order of axes
        back = library.xp.permute_dims(turned, (3, 2, 1, 0))
        return [wide[..., 1:-3], behind[:, :, ::-1, :], back]

    for choice, aligned in enumerate((0, 1, 0)):
        laid_out = [None if x is None else views(x)[choice] for x in given]
        assert packed(*(x for x in laid_out if x is not None)) == aligned
        for name, array in results(kernel.sdpa, laid_out, causal=True).items():
            same = np.allclose(library.to_numpy(array), library.to_numpy(wanted[name]), rtol=1e-12)
            assert same, name
