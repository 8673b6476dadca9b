"""Attention by tensor cores: sizes around its tiles, every option, and who runs.

A block has 128 or 64 rows, 16 or 32 for each warp; 64, 32 or 16 of the other kind pass by.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_shim
import numpy as np
import pytest
from cuda_shim import Fault
from devices import bits, placed
from libraries import ON_DEVICE, only
from nvidia import without_cudnn
from stored import DTYPES, Host, in_both, normal, on, require_exact

from xformer import RandomKey, explain, ops
from xformer.backends import Backend
from xformer.backends.cupy.flash import TILES
from xformer.backends.cupy.module import DRIVERS, Source
from xformer.layers.attention import merge_heads, split_heads

pytestmark = only(*ON_DEVICE)

MMA = Path(__file__).parent.parent / "backends" / "cupy" / "mma.cuh"
KEY = RandomKey(2**40 + 5, 2, 1)


@pytest.fixture(autouse=True)
def by_flash(library: Backend) -> Iterator[None]:
    with without_cudnn(library):
        yield


def inputs(
    length: tuple[int, int], heads: tuple[int, int] = (2, 1), widths: tuple[int, int] = (32, 32)
) -> list[Host]:
    (t, s), (h, g), (k, m) = length, heads, widths
    return [normal(1, 2, h, t, k), normal(2, 2, g, s, k), normal(3, 2, g, s, m)]


def require(library: Backend, precision: str, *arrays: Any, **options: Any) -> None:
    """The gradients go by ctx as it is stored, which is one rounding more."""
    kinds = "ssss-f" if len(arrays) == 5 else "ssss--"
    require_exact(library, precision, ops.sdpa, *arrays, kinds=kinds, roundings=2, **options)


@in_both
@pytest.mark.parametrize("length", [(17, 17), (33, 16), (65, 70), (130, 31)], ids=str)
def test_lengths_around_tiles(library: Backend, precision: str, length: tuple[int, int]) -> None:
    require(library, precision, *inputs(length))
    require(library, precision, *inputs(length), causal=True)


@in_both
@pytest.mark.parametrize("widths", [(8, 16), (40, 64), (64, 24), (128, 72), (8, 128)], ids=str)
def test_widths(library: Backend, precision: str, widths: tuple[int, int]) -> None:
    require(library, precision, *inputs((33, 67), widths=widths), causal=True)


@in_both
def test_options(library: Backend, precision: str) -> None:
    rng = np.random.default_rng(4)
    arrays = inputs((35, 71), heads=(4, 2))
    mask = rng.random((2, 1, 35, 71)) < 0.6
    mask[0, :, 11] = False  # a query that sees nothing
    for options in (
        {"window": (9, 3)},
        {"window": (None, 0), "scale": 0.3},
        {"softcap": 2.0, "causal": True},
        {"mask": mask},
        {"mask": np.arange(71) > 5, "causal": True},
        {"dropout_rate": 0.3, "dropout_key": KEY, "causal": True},
        {"dropout_rate": 0.3, "dropout_key": KEY, "mask": mask, "softcap": 3.0},
    ):
        require(library, precision, *arrays, **options)
    require(library, precision, *arrays, None, normal(5, 4), causal=True, window=(20, None))


@in_both
def test_scores_that_are_large(library: Backend, precision: str) -> None:
    q, k, v = inputs((33, 40))
    require(library, precision, 30 * q, k, v)


def test_what_a_query_does_not_see_may_be_anything(library: Backend) -> None:
    """NaN and infinity in the last key, in a tile that queries before it read."""
    q, k, v = inputs((33, 40))
    hidden = library.asarray(np.arange(40) < 39)

    def ctx(last: float, **options: Any) -> Host:
        keys = k.copy()
        keys[:, :, -1] = last
        arrays = (on(library, x, DTYPES["bfloat16"]) for x in (q, keys, v))
        return library.to_numpy(ops.sdpa(*arrays, **options)[0]).astype(np.float64)

    for options, n in (({"causal": True}, 32), ({"mask": hidden}, 33)):
        wanted = ctx(0.0, **options)
        for what in (np.nan, np.inf):
            got = ctx(what, **options)
            assert np.array_equal(got[:, :, :n], wanted[:, :, :n])
            assert np.isnan(got[:, :, n:]).all()


def test_views(library: Backend) -> None:
    """Rows of packed queries, keys and values where they lie; others are copied. No NaN is read."""
    dtype = DTYPES["bfloat16"]
    packed = placed(library, normal(1, 2, 20, 3 * 64).astype(dtype))
    q, k, v = (split_heads(packed[:, :, 64 * i : 64 * (i + 1)], 2) for i in range(3))
    odd = [on(library, normal(1, 2, 2, 20, 33), dtype)[..., 1:] for _ in range(3)]
    for arrays in ((q, k, v), odd):
        plain = [a.copy() for a in arrays]
        got, wanted = (ops.sdpa(*a, causal=True) for a in (arrays, plain))
        dctx = merge_heads(got[0])  # lies as heads of a token do
        for a, b in zip(
            (got[0], *got[1].backward(split_heads(dctx, 2))),
            (wanted[0], *wanted[1].backward(wanted[0])),
            strict=True,
        ):
            assert bits(library, a) == bits(library, b)


def test_who_runs_and_why(library: Backend) -> None:
    def said(*shapes: tuple[int, ...], dtype: Any = DTYPES["float16"], **options: Any) -> str:
        return explain(ops.sdpa, *(on(library, normal(1, *s), dtype) for s in shapes), **options)

    good, start = (1, 2, 17, 16), f"sdpa on {library.name}: xformer.backends.cupy."
    assert said(good, good, good).startswith(f"{start}flash.sdpa")
    few, odd, wide = (1, 2, 16, 16), (1, 2, 17, 12), (1, 2, 17, 136)
    for why, text in (
        ("there are 16 queries, so few that", said(few, good, good)),
        ("heads are 12 wide, no multiple of 8 up to 128", said(odd, odd, good)),
        ("heads are 136 wide, no multiple of 8 up to 128", said(wide, wide, wide)),
        ("numbers of two bytes, not float32", said(good, good, good, dtype=np.float32)),
    ):
        assert text.startswith(f"{start}sdpa.sdpa")
        assert f"flash.sdpa: {why}" in text.replace("it multiplies ", "")


def test_tiles_that_nothing_sees_are_not_read(library: Backend) -> None:
    """Keys ahead of causality's, and behind a window, may be NaN, tiles away."""
    dtype, other = DTYPES["bfloat16"], TILES[32][1]
    q, k, v = (x[:1].astype(dtype) for x in inputs((20, 20 + 3 * other)))
    options: Any = {"causal": True, "window": (10, 0)}
    ctx, cache = ops.sdpa(*(placed(library, x) for x in (q, k, v)), **options)
    wanted = [bits(library, x) for x in (ctx, *cache.backward(ctx)[:1])]
    k[:, :, : 2 * other] = v[:, :, : 2 * other] = np.nan
    ctx, cache = ops.sdpa(*(placed(library, x) for x in (q, k, v)), **options)
    assert [bits(library, x) for x in (ctx, *cache.backward(ctx)[:1])] == wanted


# ---- What the stand-in finds: a mistake planted in the source ----


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("        copies.wait<0>();\n        __syncthreads();", "        __syncthreads();"),
        ("__syncthreads();  // the tile is there", "// the tile is there"),
        (
            "multiply<stored>(s[m][n], a[m], y[0], y[1])",
            "multiply<stored>(s[m][n], a[m], y[1], y[0])",
        ),
        (
            "return lane % 16 * STRIDE + lane / 16 * 8;",
            "return lane % 16 * STRIDE + lane / 16 * 4;",
        ),
        ("load_transposed(y, others", "load_matrices(y, others"),
        ("tiles_of_keys + (turn ^ 1) * PAIR", "tiles_of_keys + turn * PAIR"),
        (
            "const int r = nth / PACKS, c = nth % PACKS * 8;\n        if (r < n_rows &&",
            "const int r = nth / PACKS, c = nth % PACKS * 8;\n        if (",
        ),
    ],
    ids=["wait", "barrier", "words", "place", "transposed", "buffer", "rows"],
)
def test_mistakes_show(
    stand_in: Backend, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    """Each is a fault, or makes numbers that are wrong."""
    launch = DRIVERS[cuda_shim.Array].launch
    planted = []

    def with_mistake(source: Source, name: str, *rest: Any) -> None:
        if name == "flash_forward":
            source = Source(str(source.path), dtypes=source.dtypes, **source.macros)
            text = source.text.replace(right, wrong)
            planted.append(text != source.text)
            vars(source)["text"] = text
            source.path = source.path.with_name(f"mistake-{abs(hash(wrong))}.cu")
        launch(source, name, *rest)

    monkeypatch.setattr(DRIVERS[cuda_shim.Array], "launch", with_mistake)
    with pytest.raises((Fault, AssertionError)):
        require(stand_in, "bfloat16", *inputs((35, 140)))
    assert planted[0]
