"""`sdpa` in programs: every option at sizes that no tile divides, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from array_api_compat import array_namespace

pytest.importorskip("numba", reason="needs extra numba")

from programs import THREADS, judged, names, record
from test_numpy_sdpa import masks

from xformer import RandomKey, dispatch, ops, reference_only
from xformer.backends.numba.program import engine
from xformer.backends.numba.program.traced import constant
from xformer.backends.numpy.threads import libraries

KEY = RandomKey(2**63 + 5, 2, 1)
LENGTHS = ((70, 130), (130, 70), (17, 90), (3, 300), (1, 200))


def arrays(
    heads: tuple[int, int] = (4, 2),
    length: tuple[int, int] = (70, 130),
    *,
    batch: int = 2,
    width: int = 11,
    bias: tuple[int, ...] | None = None,
    sinks: bool = False,
    size: float = 1.0,
) -> list[np.ndarray]:
    """q, k, v, dctx, and bias and sinks that are given; token-major, as a layer passes them."""
    rng, (h, g), (t, s) = np.random.default_rng(3), heads, length

    def tokens(n: int, heads: int, width: int) -> np.ndarray:
        x = rng.normal(size=(batch, n, heads, width)).astype(np.float32)
        return x.transpose(0, 2, 1, 3)

    own = [tokens(t, h, width), tokens(s, g, width), tokens(s, g, 13), tokens(t, h, 13)]
    own[0] = own[0] * np.float32(size)
    own += [] if bias is None else [rng.normal(size=bias).astype(np.float32)]
    return own + ([rng.normal(size=h).astype(np.float32)] if sinks else [])


def both_ways(
    bias: bool = False, sinks: bool = False, mask: bool = False, **options: Any
) -> Callable[..., Any]:
    """q, k, v, dctx, and bias, sinks and mask that are given -> ctx and all gradients."""

    def fn(q: Any, k: Any, v: Any, dctx: Any, *others: Any) -> list[Any]:
        rest = list(others)
        own = rest.pop(0) if bias else None, rest.pop(0) if sinks else None
        ctx, cache = ops.sdpa(q, k, v, *own, mask=rest.pop() if mask else None, **options)
        return [ctx, *(x for x in cache.backward(dctx) if x is not None)]

    return fn


def require(options: dict[str, Any], threads: int = 2, **given: Any) -> None:
    """As exact as the reference, all of it by kernels."""
    made, options = arrays(**given), dict(options)
    mask = options.pop("mask", None)
    own = given.get("bias") is not None, given.get("sinks", False), mask is not None
    fn, made = both_ways(*own, **options), made if mask is None else [*made, mask]
    judged(fn, made, threads)


@pytest.mark.parametrize("length", [(70, 130), (1, 130)], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 2.0}], ids=str)
def test_bias_and_sinks(length: tuple[int, int], options: Any) -> None:
    for given in ({}, {"bias": (4, 1, 130), "sinks": True}):
        require(options, length=length, **given)


@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_plain(length: tuple[int, int]) -> None:
    """Causal, windows and masks of keys; one query too."""
    keys = masks(length)["keys"]
    for options in ({"causal": True}, {"mask": keys}, {"mask": keys[1:], "causal": True}):
        require(options, length=length)
    for window in ((3, None), (None, 2), (40, 20), (0, 0)):
        require({"window": window}, length=length)


@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_every_option(length: tuple[int, int]) -> None:
    """Alone and together; rows that see nothing, and a bias or sinks beside them."""
    t, s = length
    several, drop = masks(length), {"dropout_rate": 0.3, "dropout_key": KEY}
    for options in ({"softcap": 0.7}, drop, {"mask": several["pairs"]}, {"mask": several["one"]}):
        require(options, length=length)
    require({"causal": True}, length=length, sinks=True)
    require({"causal": True, "window": (5, 3), "mask": several["pairs"]}, length=length, sinks=True)
    together = {"causal": True, "softcap": 2.0, "mask": several["pairs"], **drop}
    require(together, length=length, bias=(4, t, s), sinks=True)


@pytest.mark.parametrize(
    "shape",
    [
        *((2, 4, 70, 130), (1, 4, 70, 130), (2, 1, 70, 130), (70, 130), (4, 1, 130)),
        *((2, 1, 1, 130), (130,)),
    ],
    ids=str,
)
def test_gradient_of_a_bias(shape: tuple[int, ...]) -> None:
    """Summed over what shares it."""
    require({"causal": True, "softcap": 3.0}, bias=shape, sinks=True)


@pytest.mark.parametrize("shape", [(4, 70, 1), (4, 1, 1), (1,)], ids=str)
def test_gradient_of_a_bias_that_keys_share(shape: tuple[int, ...]) -> None:
    """Not 0 beside sinks. The terms of its sums cancel: to the rounding of those."""
    made = arrays(bias=shape, sinks=True)
    fn = both_ways(bias=True, sinks=True, causal=True)
    got = record(fn, made)(*made)[4]
    with reference_only():
        wanted = fn(*(x.astype(np.float64) for x in made))[4]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", THREADS)
def test_pieces(threads: int) -> None:
    """The same bits on any number of threads."""
    drop = {"dropout_rate": 0.3, "dropout_key": KEY}
    for options, given in (
        ({"causal": True}, {}),
        ({}, {"length": (1, 300)}),
        (drop, {"bias": (1, 6, 70, 130), "sinks": True}),
    ):
        made = arrays((6, 3), batch=3, **given)
        fn = both_ways("bias" in given, "sinks" in given, **options)
        first = record(fn, made, 1)(*made)
        for got, wanted in zip(judged(fn, made, threads)(*made), first, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("size", [1e-3, 30, 300])
def test_scores_of_every_size(size: float) -> None:
    for given in ({}, {"sinks": True}, {"bias": (4, 1, 130)}, {"length": (1, 130), "batch": 8}):
        require({"causal": True}, size=size, **given)


def test_a_bias_may_be_the_lowest_number() -> None:
    """As a mask that is added: a row of nothing else is its mean, as in the reference."""
    made = arrays(bias=(70, 130))
    made[4][:, 50:], made[4][3] = -np.inf, np.finfo(np.float32).min
    judged(both_ways(bias=True), made)


def test_layouts() -> None:
    """Head-major and token-major arrays are read as they are; others are copied."""

    turned: list[Callable[[Any], Any]] = [
        lambda x: x,
        lambda x: x[..., ::-1],
        lambda x: x[:, :, ::-1],
        lambda x: x[:, ::-1],
    ]
    for length in ((70, 130), (1, 130)):
        made = arrays(length=length)
        for fn in (both_ways(causal=True), both_ways(softcap=2.0)):
            wanted = record(fn, made)(*made)
            for turn in turned:
                own = [np.ascontiguousarray(turn(x)) for x in made]
                run = record(lambda *x, fn=fn, turn=turn: fn(*map(turn, x)), own)
                for got, array in zip(run(*own), wanted, strict=True):
                    np.testing.assert_allclose(got, array, rtol=1e-5, atol=1e-5)

    def sliced(x: Any, dctx: Any) -> list[Any]:  # of a row of q, k and v side by side
        xp = array_namespace(x)
        q, k, v = (xp.permute_dims(x[:, :, i], (0, 2, 1, 3)) for i in range(3))
        ctx, cache = ops.sdpa(q, k, v, causal=True)
        return [ctx, *cache.backward(dctx)[:3]]

    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 40, 3, 4, 11)).astype(np.float32)
    dctx = rng.normal(size=(2, 4, 40, 11)).astype(np.float32)
    run = judged(
        sliced, [x, dctx.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)], others=["copy"]
    )
    assert str(run).count("<- input 0") == 2  # forward and backward read it as it is


def test_a_shared_bias_that_is_broadcast() -> None:
    """In memory once: its gradient has an element for each of its own all the same."""
    made = arrays(bias=(1, 4, 70, 130))

    def fn(q: Any, k: Any, v: Any, dctx: Any, bias: Any) -> list[Any]:
        shared = array_namespace(q).broadcast_to(bias, (2, 4, 70, 130))
        _, cache = ops.sdpa(q, k, v, shared)
        return [cache.backward(dctx)[3]]

    judged(fn, made)


def test_a_gradient_that_nobody_asks_for() -> None:
    """That of a constant bias, and of sinks, is not computed."""
    made, bias = arrays(), np.zeros((70, 130), np.float32)

    def fn(q: Any, k: Any, v: Any, dctx: Any) -> list[Any]:
        ctx, cache = ops.sdpa(q, k, v, constant(bias))
        return [ctx, *cache.backward(dctx)[:3]]

    assert [name for name in names(record(fn, made)) if "dbias" in name] == []


def test_the_mask_of_dropout_is_the_references() -> None:
    """Bit for bit, at steps that only a run knows."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 3, 20, 8)).astype(np.float32) for _ in range(2))
    v = np.broadcast_to(np.eye(20, dtype=np.float32), (2, 3, 20, 20)).copy()  # ctx: dropped probs

    def fn(q: Any, k: Any, v: Any, step: Any) -> list[Any]:
        key = RandomKey(2**63 + 9, step, 4)
        return [ops.sdpa(q, k, v, dropout_rate=0.4, dropout_key=key)[0]]

    run = record(fn, [q, k, v, np.array(0)])
    for step in (0, 7, 2**32 - 1):
        with reference_only():
            wanted = ops.sdpa(q, k, v, dropout_rate=0.4, dropout_key=RandomKey(2**63 + 9, step, 4))[
                0
            ]
        got = run(q, k, v, np.array(step))[0]
        np.testing.assert_array_equal(got == 0, wanted == 0)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("length", [(70, 130), (1, 130)], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_what_a_mask_hides_may_be_anything(length: tuple[int, int], options: Any) -> None:
    """NaN or infinity in keys that nobody sees; and NaN stays where it is seen."""
    mask, made = masks(length)["keys"], arrays(length=length)[:3]

    def fn(q: Any, k: Any, v: Any, mask: Any) -> list[Any]:
        return [ops.sdpa(q, k, v, mask=mask, **options)[0]]

    run = record(fn, [*made, mask])
    wanted = run(*made, mask)[0]
    for what in (np.nan, np.inf):
        hidden = np.where(np.moveaxis(mask, 3, 2), made[1], np.float32(what))
        hidden = hidden.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
        np.testing.assert_array_equal(run(made[0], hidden, made[2], mask)[0], wanted)
    for which in range(3):
        own = [*(x.copy("K") for x in made), mask]
        own[which][1, 1, 0, 3] = np.nan
        with reference_only(), np.errstate(invalid="ignore"):
            plain = fn(*own)[0]
        np.testing.assert_array_equal(np.isnan(run(*own)[0]), np.isnan(plain))


def test_what_it_leaves_to_the_reference() -> None:
    made = arrays()

    def why(*given: Any, **options: Any) -> str:
        said: list[str] = []

        def fn(*traced: Any) -> list[Any]:
            said.append(dispatch.explain(ops.sdpa, *traced, **options))
            return [traced[0]]

        record(fn, given)
        return said[0]

    assert "only float32" in why(*(x.astype(np.float64) for x in made[:3]))
    assert "a rate of 1" in why(*made[:3], dropout_rate=1.0, dropout_key=KEY)
    assert "empty arrays" in why(made[0], made[1][:, :, :0], made[2][:, :, :0])
    assert "kernels.sdpa" in why(*made[:3], softcap=1.0)


def test_blas_has_one_thread_while_kernels_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each thread of a program would wake all of BLAS's for products of a tile."""
    made, thread_words, seen = arrays(), engine._thread_words, list[int]()

    def looked() -> Any:
        seen.append(min(library["num_threads"] for library in blas()))
        return thread_words()

    def blas() -> list[Any]:
        own = libraries()  # NumPy's; of another's threads, such as MKL's, nobody takes any
        return [x for x in threadpoolctl.threadpool_info() if x["filepath"] in own]

    monkeypatch.setattr(engine, "_thread_words", looked)
    run = record(both_ways(softcap=2.0), made, 1)
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        run(*made)
        assert set(seen) == {1}
        assert min(library["num_threads"] for library in blas()) == 2
