"""numba's `advance` and `linear` of a token: as the reference, and as far as they go."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from causal_models import CHANGES, NAMES, causal, require_other_arrays
from test_numpy_advance import FORMS, LEFT, continued, own

from xformer import backends, dispatch, inference, kernels, ops, reference_only, tree
from xformer.dispatch import Overridable
from xformer.layers.advance import advance
from xformer.layers.rotary import rotary
from xformer.models import LanguageModel
from xformer.models.language_model import language_model_extend
from xformer.typing import Array

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.append import LEAST, Room
from xformer.backends.numba import advance as kernel
from xformer.backends.numba import extend, gemm, layer, linear, plan, registers
from xformer.backends.numpy import products


@pytest.fixture(autouse=True)
def numba() -> Iterator[None]:
    with kernels("numba"), threadpoolctl.threadpool_limits(3, user_api="blas"):
        yield


@pytest.fixture(params=["with extend", "alone"])
def ran(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each token that the kernel has advanced by, or that of `extend`."""
    calls: list[int] = []

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: calls.append(1) or run(*args, **options)

    replaced(monkeypatch, advance, kernel.advance, counted(kernel.advance))
    own = extend.language_model_extend
    if request.param == "alone":
        monkeypatch.setitem(language_model_extend.kernels, "numba", [])
    else:
        replaced(monkeypatch, language_model_extend, own, counted(own))
    return calls


def replaced(
    monkeypatch: pytest.MonkeyPatch, op: Overridable, own: Callable[..., Any], other: Any
) -> None:
    """One of numba's kernels of an op by another."""
    kernels = op.import_kernels("numba")
    known = [k._replace(run=other) if k.run is own else k for k in kernels]
    monkeypatch.setitem(op.kernels, "numba", known)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has its turn between the look at buffers and their claim."""

    def capacity(room: Room) -> int:
        time.sleep(5e-3)
        return int(vars(room)["capacity"])

    def keep(room: Room, value: int) -> None:
        vars(room)["capacity"] = value

    monkeypatch.setattr(Room, "capacity", property(capacity, keep), raising=False)


def small(form: str, **how: Any) -> tuple[Any, Any]:
    """In float32, with an activation that the loops have."""
    return own(form, dtype="float32", **how)


def require_exact(model: Any, params: Any, n_texts: int = 1) -> None:
    """Within twice the reference's distance from the reference in float64.

    And 8 roundings: with OpenBLAS's Haswell kernels one form is 14.6 off, the reference 4.1.
    """
    got = continued(model, params, n_texts)
    with reference_only():
        plain = continued(model, params, n_texts)
        exact = continued(model, tree.map(lambda p: p.astype(np.float64), params), n_texts)
    for one, other, wanted in zip(got, plain, exact, strict=True):
        assert one.dtype == np.float32 and one.shape == wanted.shape
        off, off_plain = (np.max(np.abs(a - wanted)) for a in (one, other))
        assert off <= 2 * off_plain + 8 * np.finfo(np.float32).eps * np.max(np.abs(wanted))


def sideways(w: Array) -> Array:
    """Its columns contiguous: as `torch` keeps the weights of a linear map."""
    return np.asfortranarray(w) if w.ndim == 2 else w


def apart(w: Array) -> Array:
    """Its rows with others between them, as those of a packed map."""
    return np.hstack([w, w])[:, : w.shape[1]] if w.ndim == 2 else w


LAYOUTS: tuple[Callable[[Array], Array], ...] = (np.ascontiguousarray, sideways, apart)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, interleaved: bool, ran: list[int]) -> None:
    for n_texts in (1, 3, 4):
        require_exact(*small(form, interleaved=interleaved), n_texts=n_texts)
    assert len(ran) == 15


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_in_pieces(
    layout: Callable[[Array], Array], ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pieces, so that all threads have some, and each sum several parts."""
    monkeypatch.setattr(plan, "PAIR", 64)
    for form in FORMS:
        model, params = small(form)
        params = params._replace(stack=tree.map(layout, params.stack))
        for n_texts in (1, 2):
            require_exact(model, params, n_texts)
    assert len(ran) == 10 * len(FORMS)


def packed(stack: Any, order: str) -> Any:
    """Weights of one x side by side in an array of their own, in some order; u: up, g: gate."""

    def block(own: Any) -> Any:
        kv, ffn = own.attn.kv, own.ffn
        maps = {"q": own.attn.q, "k": kv.k, "v": kv.v, "u": ffn.up, "g": ffn.gate}
        maps = {name: maps[name] for name in order if maps[name] is not None}
        ends = np.cumsum([m.w.shape[1] for m in maps.values()])[:-1]
        parts = np.split(np.hstack([m.w for m in maps.values()]), ends, axis=1)
        new = {n: m._replace(w=w) for (n, m), w in zip(maps.items(), parts, strict=True)}
        kv = kv._replace(k=new.get("k", kv.k), v=new.get("v", kv.v))
        ffn = ffn._replace(up=new.get("u", ffn.up), gate=new.get("g", ffn.gate))
        return own._replace(attn=own.attn._replace(q=new.get("q", own.attn.q), kv=kv), ffn=ffn)

    return stack._replace(blocks=tuple(block(own) for own in stack.blocks))


@pytest.mark.parametrize("pair", [64, plan.PAIR])
@pytest.mark.parametrize("order", ["qkv", "qk", "kv", "vkq", "ug", "gu"])
def test_packed_maps(
    order: str, pair: int, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "PAIR", pair)
    for form in FORMS:
        model, params = small(form)
        params = params._replace(stack=packed(params.stack, order))
        for n_texts in (1, 3):
            require_exact(model, params, n_texts)
    assert len(ran) == 10 * len(FORMS)


@pytest.mark.parametrize(
    "order, maps, pieces",
    [
        ("qkv", slice(layer.QUERY, layer.OUT), [1, 0, 0]),
        ("qk", slice(layer.QUERY, layer.OUT), [1, 0, 1]),
        ("kv", slice(layer.QUERY, layer.OUT), [1, 1, 0]),
        ("vkq", slice(layer.QUERY, layer.OUT), [1, 1, 1]),
        ("ug", slice(layer.UP, layer.DOWN), [1, 0]),
    ],
)
def test_packed_maps_are_one_product(order: str, maps: slice, pieces: list[int]) -> None:
    model, params = small("gated silu, no biases")
    alone, together = (
        plan._made(stack.blocks, model.blocks, stack.norm).tables.maps[0, maps]
        for stack in (params.stack, packed(params.stack, order))
    )
    assert np.all(alone[:, layer.PIECES] == 1) and np.all(alone[:, layer.FIRST] == 0)
    assert [*together[:, layer.PIECES]] == pieces
    products, widths = np.cumsum(pieces), together[:, layer.N_OUT]  # in which product a map is
    for i, own_row in enumerate(together):
        same = products == products[i]
        assert own_row[layer.ROW] == widths[same].sum()
        assert own_row[layer.FIRST] == widths[:i][same[:i]].sum()


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PAIR", 64)
    model, params = small("gated silu, no biases")
    found = []
    for n in (1, 2, 3):
        with threadpoolctl.threadpool_limits(n, user_api="blas"):
            found.append(continued(model, params, 2))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert np.array_equal(one, other)


def test_a_text_that_many_threads_continue(slow: None) -> None:
    """Each has an end of its own, beyond the end of the buffers too."""
    model, params = small("layer norms")
    model = replace(model, embed=replace(model.embed, max_len=4 * LEAST))
    _, before = model.extend(params, np.ones((1, LEAST - 4), int), model.start())
    _, state = model.extend(params, np.ones((1, 1), int), before)
    ids = [int(i) for i in np.random.default_rng(1).permutation(model.embed.vocab_size)[:4]]
    gate = threading.Barrier(len(ids))

    def ended(i: int, wait: bool = True) -> Array:
        own = state
        if wait:
            gate.wait(10)
        with kernels("numba"):  # which another thread has to choose too
            for _ in range(3):
                logits, own = model.extend(params, np.array([[i]]), own)
        return logits

    wanted = [ended(i, wait=False) for i in ids]
    _, state = model.extend(params, np.ones((1, 1), int), before)  # whose buffers nobody has taken
    with ThreadPoolExecutor(len(ids)) as pool:
        got = list(pool.map(ended, ids))
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_texts_that_are_repeated_by_hand() -> None:
    """Arrays of a past that its buffers have not: they are made anew."""
    model, params = small("layer norms")
    _, state = model.extend(params, np.ones((1, 3), int), model.start())
    _, state = model.extend(params, np.ones((1, 1), int), state)
    twice = [own._replace(k=np.repeat(own.k, 2, 0), v=np.repeat(own.v, 2, 0)) for own in state.past]
    got, _ = model.extend(params, np.zeros((2, 1), int), state._replace(past=tuple(twice)))
    wanted, _ = model.extend(params, np.zeros((1, 1), int), state)
    np.testing.assert_allclose(got, np.repeat(wanted, 2, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_a_past_that_was_given_other_arrays(name: str, change: str, ran: list[int]) -> None:
    require_other_arrays(backends.get("numpy"), name, change, "float32")
    assert len(ran) == 3


@pytest.mark.parametrize("name", NAMES)
def test_every_family(name: str, ran: list[int]) -> None:
    model, params = causal(name)
    params = tree.map(lambda p: p.astype(np.float32), params)
    require_exact(getattr(model, "network", model), params, n_texts=2)
    assert len(ran) == (0 if name in LEFT else 5)


def test_a_long_text_and_two_ends_of_it() -> None:
    """Its buffers are made anew as it grows; what one end writes is not in the other."""
    model, params = small("gelu_tanh, window")
    wide = replace(
        model,
        blocks=tuple(replace(b, window=None) for b in model.blocks),
        embed=replace(model.embed, max_len=3 * LEAST),
    )
    ids = np.random.default_rng(7).integers(0, model.embed.vocab_size, (2, 2 * LEAST - 8))
    for one in (wide, replace(wide, blocks=model.blocks)):
        _, state = one.extend(params, ids[:, :3], one.start())
        halfway = None
        for i in range(3, ids.shape[1]):
            logits, state = one.extend(params, ids[:, i : i + 1], state)
            if i == LEAST + 3:
                halfway = state
        other, _ = one.extend(params, ids[:, :1], halfway)
        with reference_only():
            wanted, whole = one.extend(params, ids, one.start())
            cut = np.concatenate([ids[:, : LEAST + 4], ids[:, :1]], axis=1)
            wanted_other, _ = one.extend(params, cut, one.start())
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(other, wanted_other, rtol=1e-4, atol=1e-4)
        for got, kept in zip(state.past, whole.past, strict=True):
            n = min(got.length, kept.length)
            np.testing.assert_allclose(got.last(n).k, kept.last(n).k, rtol=1e-4, atol=1e-5)


def test_one_plan_for_a_text_and_another_for_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = plan._made
    monkeypatch.setattr(plan, "_made", lambda *args: made.append(1) or real(*args))
    model, params = small("layer norms")
    _, state = model.extend(params, np.ones((1, 3), int), model.start())
    made.clear()
    for _ in range(5):
        _, state = model.extend(params, np.ones((1, 1), int), state)
    assert len(made) == 1
    doubled = tree.map(lambda p: 2 * p, params)
    got, _ = model.extend(doubled, np.ones((1, 1), int), state)
    assert len(made) == 2
    with reference_only():
        wanted, _ = model.extend(doubled, np.ones((1, 1), int), state)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copied_state_has_memory_of_its_own(copied: Callable[[Any], Any]) -> None:
    model, params = small("layer norms")
    _, state = model.extend(params, np.ones((1, 3), int), model.start())
    _, state = model.extend(params, np.ones((1, 1), int), state)
    same, own_params, other = copied((model, params, state))  # a plan with them
    wanted, after = model.extend(params, np.zeros((1, 1), int), state)
    kept = [(one.k.copy(), one.v.copy()) for one in after.past]
    got, ahead = same.extend(own_params, np.zeros((1, 1), int), other)
    assert np.array_equal(got, wanted)
    same.extend(own_params, np.ones((1, 1), int), ahead)
    for one, (k, v), copied_one in zip(after.past, kept, ahead.past, strict=True):
        assert np.array_equal(one.k, k) and np.array_equal(one.v, v)
        assert np.array_equal(copied_one.k, k) and np.array_equal(copied_one.v, v)
        assert not np.shares_memory(copied_one.place.room.k, one.place.room.k)


def test_each_text_has_its_place() -> None:
    """Rotary positions of their own, as beside padding."""
    model, params = small("layer norms")
    x = np.random.default_rng(5).normal(size=(2, 1, 24)).astype(np.float32)
    turns = rotary(model.rotary, like=x, length=9, positions=np.array([[4], [8]]))
    past = past_of(model, 2, np.float32)
    options: Any = {"configs": model.blocks, "past": past, "n_past": 3, "rotary": turns}
    assert kernel.outside(x, params.stack, **options) is None
    got, grown = kernel.advance(x, params.stack, **options)
    wanted, own_past = advance.reference(x, params.stack, **options)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    for one, other in zip(grown, own_past, strict=True):
        np.testing.assert_allclose(one.k, other.k, rtol=1e-4, atol=1e-5)


def test_far_scores_and_values_that_are_no_numbers(ran: list[int]) -> None:
    model, params = small("layer norms")
    far = tree.map(lambda p: p * 30, params)
    assert all(np.isfinite(a).all() for a in continued(model, far, 1))
    table = params.embed.table.copy()
    table[1, 0] = np.nan
    broken = params._replace(embed=params.embed._replace(table=table))
    _, state = model.extend(broken, np.zeros((1, 3), int), model.start())
    logits, _ = model.extend(broken, np.ones((1, 1), int), state)
    assert np.isnan(logits).all() and ran


def refusals() -> dict[str, tuple[Any, ...]]:
    model, params = small("layer norms")
    odd = params.stack.blocks[0]._replace(
        ffn=tree.map(lambda p: p[..., :-1], params.stack.blocks[0].ffn)
    )
    blocks = (odd, *params.stack.blocks[1:])
    return {
        "only NumPy's own arrays of float32": (
            model,
            tree.map(lambda p: p.astype(np.float64), params),
            1,
        ),
        "at most 4 texts": (model, params, 5),
        "only silu": (
            replace(model, blocks=tuple(replace(b, activation="tanh") for b in model.blocks)),
            params,
            1,
        ),
        "other strides": (model, tree.map(lambda p: np.repeat(p, 2, axis=-1)[..., ::2], params), 1),
        "only tuples": (
            model,
            params._replace(stack=params.stack._replace(blocks=list(params.stack.blocks))),
            1,
        ),
        "in the place of": (model, params._replace(stack=params.stack._replace(blocks=blocks)), 1),
    }


@pytest.mark.parametrize("why", refusals())
def test_why_not(why: str) -> None:
    model, params, n_texts = refusals()[why]
    past = past_of(model, n_texts, params.embed.table.dtype)
    x = np.ones((n_texts, 1, 24), params.embed.table.dtype)
    options: Any = {"configs": model.blocks, "past": past, "n_past": 3}
    assert why in dispatch.explain(advance, x, params.stack, **options)


def past_of(model: LanguageModel, n_texts: int, dtype: Any) -> Any:
    """Three tokens of each layer."""
    shapes = [(n_texts, c.kv_heads, 3) for c in model.blocks]
    past = model.start().past
    return tuple(
        own._replace(k=np.ones((*s, 10), dtype), v=np.ones((*s, 6), dtype))
        for own, s in zip(past, shapes, strict=True)
    )


def test_a_past_that_does_not_fit() -> None:
    model, params = small("layer norms")
    past = past_of(model, 2, np.float32)
    x = np.ones((1, 1, 24), np.float32)
    options: Any = {"configs": model.blocks, "n_past": 3}
    said = dispatch.explain(advance, x, params.stack, past=past, **options)
    assert "a past of another kind" in said
    fits = options | {"past": past_of(model, 1, np.float32)}
    assert kernel.outside(x, params.stack, **fits) is None
    assert kernel.outside(x.astype("f8"), params.stack, **fits)
    assert kernel.outside(x[..., :-1], params.stack, **fits)
    assert kernel.outside(x[0], params.stack, **fits)
    other = (*model.blocks[:2], replace(model.blocks[2], d_model=16))
    assert "same width" in str(kernel.outside(x, params.stack, **fits | {"configs": other}))
    narrow = tuple(p._replace(v=p.v[..., :-1]) for p in past_of(model, 1, np.float32))
    assert "a past of another kind" in dispatch.explain(
        advance, x, params.stack, past=narrow, **options
    )


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_linear_of_few(n: int, turned: bool) -> None:
    """Within twice the reference's distance from float64."""
    rng = np.random.default_rng(2)
    x, b = rng.normal(size=(n, 1, 4099)).astype("f4"), rng.normal(size=1003).astype("f4")
    w = rng.normal(size=(4099, 1003)).astype("f4")
    w = np.asfortranarray(w) if turned else w
    for part, shift in ((w, b), (w[:, 1:900], None)):
        with inference():
            assert "numba.linear.linear" in dispatch.explain(ops.linear, x, part).splitlines()[0]
            y, _ = ops.linear(x, part, shift)
        exact = ops.linear.reference(
            *(a if a is None else a.astype("f8") for a in (x, part, shift))
        )
        plain, _ = ops.linear.reference(x, part, shift)
        off, off_plain = (np.max(np.abs(a - exact[0])) for a in (y, plain))
        assert y.dtype == np.float32
        assert off <= 2 * off_plain + 2 * np.finfo(np.float32).eps * np.max(np.abs(exact[0]))


def test_no_column_of_few_depends_on_threads() -> None:
    """Of columns that are contiguous some are read at once, and the last ones one by one."""
    rng = np.random.default_rng(5)
    x, w = rng.normal(size=(2, 700)).astype("f4"), rng.normal(size=(1403, 700)).astype("f4").T
    found = []
    for n in (1, 2, 3, 7):
        with threadpoolctl.threadpool_limits(n, user_api="blas"), inference():
            found.append(linear.linear(x, w)[0])
    assert all(np.array_equal(one, found[0]) for one in found[1:])


def test_linear_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on BLAS's threads, which would spin on; small products wake nobody."""
    if not registers.USABLE:
        pytest.skip("tiles are for x86-64 with AVX2 or AVX-512")
    seen: list[int] = []

    def multiply(x: Array, w: Array, out: Array, *, add: bool = False) -> None:
        seen.append(len(x))
        own(x, w, out, add=add)

    own = gemm.multiply
    monkeypatch.setattr(gemm, "multiply", multiply)
    monkeypatch.setitem(products.MULTIPLY, "numba", multiply)
    rng = np.random.default_rng(6)
    w, b = rng.normal(size=(300, 1300)).astype("f4"), rng.normal(size=1300).astype("f4")
    with inference():
        for n, wanted in ((4, []), (5, [5, 5, 5]), (128, [128, 128, 128])):
            x = rng.normal(size=(n, 300)).astype("f4")
            y, _ = ops.linear(x, w, b)
            np.testing.assert_allclose(y, x @ w + b, rtol=1e-4, atol=1e-4)
            assert seen == wanted
            seen.clear()
        assert linear.other(np.ones((129, 300), np.float32), w)
        assert "so small a product" in str(linear.other(x[:8], w[:, :100].copy()))
        monkeypatch.setitem(products.MULTIPLY, "numba", gemm.by_numpy)
        assert "only by tiles" in str(linear.other(x, w))


def test_linear_that_is_left_to_numpy() -> None:
    x, w = np.ones((1, 200), np.float32), np.ones((200, 200), np.float32)
    assert linear.other(x, w)
    with inference():
        assert linear.other(x, w) is None
        assert linear.other(np.ones((5, 200), np.float32), w)
        assert linear.other(x, w[:, :10])
        assert linear.other(x.astype("f8"), w.astype("f8"))
        assert linear.other(x, np.ones((200, 400), np.float32)[:, ::2])
        odd = np.zeros(200, [("w", "f4", (200,)), ("more", "u2")])["w"]  # rows 802 bytes apart
        assert linear.other(x, odd)
        assert linear.other(x, np.frombuffer(bytes(160_001), "f4", offset=1).reshape(200, 200))
