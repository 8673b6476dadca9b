"""numba's `blocks` of some tokens, where nothing is kept: as the reference, as far as it goes."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from causal_models import NAMES, V, causal
from test_kernels import LAYOUTS, laid_out
from test_numba_advance import LAYOUTS as LYING
from test_numpy_advance import FORMS, WIDE

from xformer import backends, dispatch, inference, kernels, layers, reference_only, tree
from xformer.layers import BlockConfig
from xformer.layers.rotary import Rotary
from xformer.typing import Array

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import blocks as kernel
from xformer.backends.numba import plan
from xformer.backends.numba import tokens as loops
from xformer.backends.numba.known import Known

LEFT = {"gpt_neox", "mixtral", "qwen3", "gemma2", "positions for q, k, v", "alibi", "shaw"}
LEFT |= {"relative bias"}
MODELS = {name: replace(WIDE, **options) for name, options in FORMS.items()} | {
    "post": BlockConfig(24, 4, 40, norm="post", activation="gelu", d_value=5),
    "post, rms, relu": BlockConfig(24, 4, 40, norm="post", norm_kind="rms", n_kv_heads=2),
    "in pieces": BlockConfig(200, 4, 296, activation="gelu", n_kv_heads=2, d_head=34),
    "in pieces, gated": BlockConfig(
        200, 5, 264, activation="silu", gated=True, norm_kind="rms", bias=False
    ),
}


@pytest.fixture(autouse=True, params=[0, 1000], ids=["columns", "rows"])
def numba(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What pieces are of, as soon as each thread has one."""
    monkeypatch.setattr(kernel, "WIDE", request.param)
    with kernels("numba"), threadpoolctl.threadpool_limits(3, user_api="blas"):
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each call of the kernel."""
    calls: list[int] = []

    def run(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return kernel.blocks(*args, **options)

    kernels = layers.blocks.import_kernels("numba")
    known = [k._replace(run=run) if k.run is kernel.blocks else k for k in kernels]
    monkeypatch.setitem(layers.blocks.kernels, "numba", known)
    return calls


def drawn(name: str, n_layers: int = 3) -> tuple[Any, tuple[BlockConfig, ...]]:
    """Parameters far from the first, in float32, of blocks and their configurations."""
    configs = (MODELS[name],) * n_layers
    rng = np.random.default_rng(3)
    generator = backends.get("numpy").generator(1, "float64")
    params = layers.StackParams.init(generator, configs).blocks
    noise = 0.3 if configs[0].d_model < 100 else 0.05
    moved = tree.map(lambda p: p + rng.normal(0, noise, p.shape), params)
    return tree.map(lambda p: p.astype(np.float32), moved), configs


def turned(n_texts: int | None, length: int, *, interleaved: bool = False) -> Rotary:
    """Tables of six columns, one for all texts or of each its own."""
    shape = (length, 3) if n_texts is None else (n_texts, length, 3)
    angles = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    return Rotary(np.cos(angles), np.sin(angles), interleaved)


def tokens(n_texts: int, length: int, width: int) -> Array:
    return np.random.default_rng(n_texts).normal(size=(n_texts, length, width)).astype(np.float32)


def wide(node: Any) -> Any:
    return tree.map(lambda p: p.astype(np.float64) if p.dtype == np.float32 else p, node)


def require_exact(x: Array, params: Any, **options: Any) -> None:
    """Within twice the reference's distance from the reference in float64.

    Of one layer the largest; of several, which blow up what one number is off, the mean square's.
    """
    with inference():
        assert kernel.outside(x, params, **options) is None
        got, _ = layers.blocks(x, params, **options)
    plain, _ = layers.blocks.reference(x, params, **options)
    turns = options.get("rotary")
    if turns is not None:
        options["rotary"] = Rotary(*map(np.float64, turns[:2]), turns.interleaved)
    exact, _ = layers.blocks.reference(wide(x), wide(params), **options)
    assert got.dtype == np.float32 and got.shape == exact.shape
    size = np.max if len(options["configs"]) == 1 else lambda a: np.sqrt(np.mean(a**2))
    off, off_plain, scale = (size(np.abs(a)) for a in (got - exact, plain - exact, exact))
    assert off <= 2 * off_plain + 2 * np.finfo(np.float32).eps * scale


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_form(name: str, n_layers: int, ran: list[int]) -> None:
    params, configs = drawn(name, n_layers)
    sizes = ((1, 1), (1, 21), (3, 17), (2, 70))
    for causal_ in (False, True):
        for n_texts, length in sizes:
            x = tokens(n_texts, length, configs[0].d_model)
            require_exact(x, params, configs=configs, causal=causal_)
    assert len(ran) == 2 * len(sizes)


@pytest.mark.parametrize("layout", LYING, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_lie_otherwise(name: str, layout: Callable[[Array], Array]) -> None:
    params, configs = drawn(name, 1)
    params = tree.map(layout, params)
    require_exact(tokens(2, 19, configs[0].d_model), params, configs=configs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_tokens_that_lie_otherwise(layout: Callable[[Any], Any]) -> None:
    params, configs = drawn("post")
    x = laid_out(layout, tokens(2, 19, 24))
    before = x.copy()
    require_exact(x, params, configs=configs)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions(interleaved: bool, own: bool) -> None:
    for name in ("layer norms", "in pieces"):
        params, configs = drawn(name)
        turns = turned(3 if own else None, 18, interleaved=interleaved)
        require_exact(tokens(3, 18, configs[0].d_model), params, configs=configs, rotary=turns)


@pytest.mark.parametrize("causal_", [False, True])
def test_hidden_keys(causal_: bool) -> None:
    """At the ends, in between, of a whole text; and the same of all texts."""
    mask = np.random.default_rng(0).random((4, 1, 1, 40)) < 0.7
    mask[0, ..., 9:], mask[1, ..., :9], mask[2] = False, False, False
    for name in ("post", "gelu_tanh, window"):
        params, configs = drawn(name)
        x = tokens(4, 40, 24)
        for hidden in (mask, mask[:1], np.ones_like(mask)):
            require_exact(x, params, configs=configs, causal=causal_, mask=hidden)
    assert len(loops.all_layers.signatures) == 1  # each would be compiled anew


@pytest.mark.parametrize("n_texts, length", [(1, 9), (1, 8), (3, 3), (2, 4)])
def test_what_pieces_are_of(n_texts: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, where each of the three threads has one for 8 of the 24 columns."""
    by_rows: list[bool] = []
    monkeypatch.setattr(loops, "all_layers", lambda *given: by_rows.append(given[2]))
    params, configs = drawn("post")
    for wide in (0, 8):
        monkeypatch.setattr(kernel, "WIDE", wide)
        with inference():
            layers.blocks(tokens(n_texts, length, 24), params, configs=configs)
    half = len(by_rows) // 2
    assert half and {*by_rows[:half]} == {False} and {*by_rows[half:]} == {n_texts * length == 9}


def test_a_few_texts_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own mask and its own positions."""
    mask = np.random.default_rng(0).random((5, 1, 1, 11)) < 0.7
    params, configs = drawn("layer norms")
    x, loops_ = tokens(5, 11, 24), []
    through = kernel._through
    monkeypatch.setattr(kernel, "_through", lambda *a: (loops_.append(len(a[1])), through(*a)))
    for n in (1, 2, 4):
        monkeypatch.setattr(kernel, "SIZE", n * 11 * 72 + 5)  # 72: of queries, keys and values
        for turns in (None, turned(None, 11), turned(5, 11)):
            for hidden in (None, mask[:1], mask):
                require_exact(x, params, configs=configs, rotary=turns, mask=hidden)
    assert {*loops_} == {1, 2, 3} and sum(loops_) == 3 * 9 * 5


def test_each_thread_takes_its_share(ran: list[int]) -> None:
    """Of masks and positions too."""
    mask = np.random.default_rng(0).random((6, 1, 1, 64)) < 0.7
    params, configs = drawn("layer norms")
    x = tokens(6, 64, 24)
    for mask_ in (None, mask[:1], mask):
        for turns in (None, turned(None, 64), turned(6, 64)):
            options: dict[str, Any] = {"configs": configs, "mask": mask_, "rotary": turns}
            with inference():
                got, _ = layers.blocks(x, params, **options)
            wanted, _ = layers.blocks.reference(x, params, **options)
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
    assert len(ran) == 9 * 3


def test_layers_that_differ() -> None:
    """In their windows, heads, widths and activations; and layers that share a block."""
    first, second = drawn("layer norms")[1][0], drawn("gated gelu, sandwich")[1][0]
    second = replace(second, norm="pre", window=(2, 1), d_ff=36, d_head=8, d_value=None)
    configs = (first, second, replace(first, window=(None, 3)))
    generator = backends.get("numpy").generator(5, "float32")
    params = layers.StackParams.init(generator, configs).blocks
    require_exact(tokens(2, 23, 24), params, configs=configs)
    require_exact(tokens(2, 23, 24), params[:1], configs=(first, first, configs[2]))
    require_exact(tokens(2, 23, 24), params[:2], configs=(first, configs[2], second, second))


def test_without_norms() -> None:
    for name in ("post", "layer norms"):
        params, configs = drawn(name)
        bare = tuple(p._replace(attn_norm=None) for p in params)
        require_exact(tokens(2, 9, 24), bare, configs=configs)
        bare = tuple(p._replace(ffn_norm=None) for p in params)
        require_exact(tokens(2, 9, 24), bare, configs=configs)


def test_any_number_of_threads() -> None:
    """The same bits with the same number, and close ones with another."""
    params, configs = drawn("in pieces")
    x, found = tokens(2, 33, 200), []
    for n in (1, 2, 3, 5):
        with threadpoolctl.threadpool_limits(n, user_api="blas"), inference():
            twice = [layers.blocks(x, params, configs=configs)[0] for _ in range(5)]
        assert all(np.array_equal(y, twice[0]) for y in twice)
        found.append(twice[0])
    for y in found[1:]:
        np.testing.assert_allclose(y, found[0], rtol=1e-4, atol=1e-4)


def test_several_threads_of_the_program() -> None:
    """One has the pool, the others do all pieces themselves."""
    params, configs = drawn("in pieces, gated")
    many = [tokens(n, 12, 200) for n in (1, 2, 3, 4)] * 5

    def run(x: Array) -> Array:
        with kernels("numba"), inference():
            return layers.blocks(x, params, configs=configs)[0]

    wanted = [run(x) for x in many]
    with ThreadPoolExecutor(4) as pool:
        for got, one in zip(pool.map(run, many), wanted, strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_stays_in_its_text() -> None:
    params, configs = drawn("post")
    x = tokens(3, 20, 24)
    x[1, 4, 2] = np.nan
    with inference():
        y, _ = layers.blocks(x, params, configs=configs)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_family(name: str, ran: list[int]) -> None:
    """Each whose blocks are of the usual kind, through its model."""
    model, params = causal(name)
    model = getattr(model, "network", model)
    params = tree.map(lambda p: p.astype(np.float32), params)
    ids = np.random.default_rng(0).integers(0, V, (2, 9))
    with inference():
        got, _ = model.forward(params, ids)
        with reference_only():
            wanted, _ = model.forward(params, ids)
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
    assert len(ran) == (name not in LEFT)


def test_only_where_nothing_is_kept() -> None:
    params, configs = drawn("post")
    x = tokens(2, 9, 24)
    assert kernel.outside(x, params, configs=configs) == "only within inference()"
    y, cache = layers.blocks(x, params, configs=configs)
    cache.backward(y)
    with inference():
        said = dispatch.explain(layers.blocks, x, params, configs=configs)
        assert said.startswith("blocks on numpy: xformer.backends.numba.blocks.blocks")
        _, cache = layers.blocks(x, params, configs=configs)
    with pytest.raises(RuntimeError, match=r"made within inference\(\)"):
        cache.backward(y)


def refused() -> list[tuple[str, Any, Any, dict[str, Any]]]:
    """Examples: a reason, x, parameters and options."""
    params, configs = drawn("post")
    rms_params, rms_configs = drawn("post, rms, relu")
    x, turns = tokens(2, 9, 24), turned(2, 9)
    base: dict[str, Any] = {"configs": configs}
    first, rest = params[0], params[1:]
    wo = first.attn.o
    changed = replace(configs[0], norm="pre"), *configs[1:]
    other = tuple(replace(c, activation="tanh") for c in configs)
    biased = rms_params[0]._replace(attn_norm=first.attn_norm), *rms_params[1:]
    wider = (replace(configs[0], d_ff=4097),)
    wide_params = layers.StackParams.init(backends.get("numpy").generator(1, "float32"), wider)

    def with_o(w: Any) -> Any:
        return first._replace(attn=first.attn._replace(o=wo._replace(w=w))), *rest

    def masked(mask: Any) -> tuple[str, Any, Any, dict[str, Any]]:
        return "only masks of keys", x, params, base | {"mask": mask}

    def rotated(rotary: Rotary) -> tuple[str, Any, Any, dict[str, Any]]:
        return "rotary positions of another kind", x, params, base | {"rotary": rotary}

    return [
        ("only NumPy's own arrays of float32", wide(x), params, base),
        ("only NumPy's own arrays of float32", np.ma.masked_array(x, x > 1), params, base),
        ("no tokens", tokens(2, 0, 24), params, base),
        ("more than 2097152 numbers", tokens(1, 512, 24), wide_params.blocks, {"configs": wider}),
        ("with its own share of the batch", tokens(6, 64, 24), params, base),
        masked(np.ones((2, 1, 9, 9), bool)),
        masked(np.zeros((2, 1, 1, 9), np.float32)),
        masked(np.ones((2, 1, 1, 9), np.int64)),
        masked([[[[True] * 9]]] * 2),
        ("a text that grows", x, params, base | {"past": (layers.Past(),) * 3}),
        rotated(turned(None, 8)),
        rotated(turned(1, 9)),
        rotated(turns._replace(sin=turns.sin[..., :2])),
        rotated(turns._replace(sin=wide(turns.sin))),
        rotated(Rotary(turns.cos[..., :0], turns.sin[..., :0], False)),
        rotated(Rotary(turns.cos[0, 0], turns.sin[0, 0], False)),
        rotated(Rotary(turns.cos.tolist(), turns.sin, False)),
        rotated(Rotary(np.ma.masked_array(turns.cos), turns.sin, False)),
        ("only what fits the model", tokens(2, 9, 20), params, base),
        ("only tuples of blocks", x, list(params), base),
        ("whose norms stand in one place", x, params, {"configs": changed}),
        ("a bias of RMSNorm", x, biased, {"configs": rms_configs}),
        ("NumPy's own arrays of float32", x, with_o(wide(wo.w)), base),
        ("in the place of", x, with_o(wo.w[:-1]), base),
        ("weights of other strides", x, with_o(np.repeat(wo.w, 2, 1)[:, ::2]), base),
        ("only silu, gelu", x, params, {"configs": other}),
    ]


@pytest.mark.parametrize("reason, x, params, options", refused())
def test_what_it_leaves_to_others(
    reason: str, x: Array, params: Any, options: dict[str, Any]
) -> None:
    with inference():
        assert reason in str(kernel.outside(x, params, **options))


def test_one_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a piece that nobody does: the others do not wait for it."""
    params, configs = drawn("in pieces")
    own, calls, inside, done = loops.all_layers, itertools.count(), threading.Event(), []

    def failing(*arguments: Any) -> None:
        if next(calls) == 0:
            arguments[-1][3, 0] += 1
            assert inside.wait(60)
            raise MemoryError("no room")
        inside.set()
        own(*arguments)
        done.append(1)

    monkeypatch.setattr(loops, "all_layers", failing)
    with inference(), pytest.raises(MemoryError, match="no room"):
        layers.blocks(tokens(2, 33, 200), params, configs=configs)
    assert done
    monkeypatch.undo()
    require_exact(tokens(2, 33, 200), params, configs=configs)


def test_a_plan_lives_as_long_as_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_known", known := Known())
    params, configs = drawn("post")
    x = tokens(1, 9, 24)

    def run(params: Any) -> Array:
        with inference():
            return layers.blocks(x, params, configs=configs)[0]

    first = run(params)
    same = tuple(p._replace() for p in params)  # other tuples of the same arrays
    assert np.array_equal(run(same), first) and len(known) == 1
    b = params[0].attn.o.b
    moved = params[0].attn.o._replace(b=b + 1)
    other = params[0]._replace(attn=params[0].attn._replace(o=moved)), *params[1:]
    assert not np.array_equal(run(other), first) and len(known) == 2
    b += 1  # in place: the same arrays, and what they hold now
    assert np.array_equal(run(params), run(other))
    del other, moved
    gc.collect()
    assert len(known) == 1
    del params, same, b
    gc.collect()
    assert len(known) == 0
