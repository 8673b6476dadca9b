"""numba's `language_model_extend`: as the reference, and as far as it goes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from causal_models import V, causal, lively
from test_numba_advance import LAYOUTS, replaced, small
from test_numpy_advance import continued

from xformer import dispatch, kernels, reference_only, tree
from xformer.generation import generate
from xformer.layers import BlockConfig, EmbedConfig, RelativeConfig
from xformer.layers.norm import NormConfig
from xformer.layers.rope_config import RopeConfig
from xformer.models import GPT, LanguageModel, LMHead
from xformer.models.language_model import language_model_extend
from xformer.typing import Array

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.append import LEAST
from xformer.backends.numba import extend, linear, plan
from xformer.backends.numba.together import Together

N_MODELS = 15  # of which a median is far from luck; each reads five tokens one by one
BLOCKS = (BlockConfig(12, 3, 20, activation="gelu"),) * 2
EMBED = EmbedConfig(V, 12, 12, 40, positions="learned")
PLAIN = EmbedConfig(V, 12, 12, positions="none")
MODELS = {
    "learned positions": LanguageModel(EMBED, BLOCKS),
    "an offset, a scale": LanguageModel(replace(EMBED, offset=2, scale=3.5), BLOCKS),
    "a head of its own": LanguageModel(EMBED, BLOCKS, head=LMHead(tied=False)),
    "a head with a bias": LanguageModel(EMBED, BLOCKS, head=LMHead(tied=False, bias=True)),
    "rotary": LanguageModel(PLAIN, BLOCKS, rotary=RopeConfig(4)),
    "rotary, interleaved": LanguageModel(PLAIN, BLOCKS, rotary=RopeConfig(2, interleaved=True)),
    "no positions": LanguageModel(PLAIN, BLOCKS),
}


@pytest.fixture(autouse=True)
def numba() -> Iterator[None]:
    with kernels("numba"), threadpoolctl.threadpool_limits(3, user_api="blas"):
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each token that the kernel has read."""
    calls: list[int] = []
    own = extend.language_model_extend

    def run(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return own(*args, **options)

    replaced(monkeypatch, language_model_extend, own, run)
    return calls


def of_float32(model: Any, seed: int = 0) -> Any:
    return tree.map(lambda p: p.astype(np.float32), lively(model, seed))


def require_exact(model: Any, n_texts: int = 1, layout: Any = np.ascontiguousarray) -> None:
    """Within twice the reference's distance from the reference in float64, by models' median.

    Of one it is a matter of luck, as of five: layers blow up what a few numbers are off.
    """
    offs, scales = [], []
    for seed in range(N_MODELS):
        params = tree.map(layout, of_float32(model, seed))
        got = continued(model, params, n_texts)
        with reference_only():
            plain = continued(model, params, n_texts)
            exact = continued(model, tree.map(lambda p: p.astype(np.float64), params), n_texts)
        for one, wanted in zip(got, exact, strict=True):
            assert one.dtype == np.float32 and one.shape == wanted.shape
        offs.append([[_size(a - w) for a, w in zip(x, exact, strict=True)] for x in (got, plain)])
        scales.append([_size(wanted) for wanted in exact])
    off, off_plain = np.median(offs, axis=0)
    assert np.all(off <= 2 * off_plain + 2 * np.finfo(np.float32).eps * np.median(scales, axis=0))


def _size(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def why_not(model: Any, params: Any, state: Any, tokens: Any, **options: Any) -> str | None:
    options |= {"model": getattr(model, "network", model), "state": state}
    return extend.outside(tokens, params, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pair", [8, plan.PAIR])
def test_every_model(name: str, pair: int, ran: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In small pieces too, so that all threads have some of the layers and of the head."""
    monkeypatch.setattr(plan, "PAIR", pair)
    if pair == 8:
        monkeypatch.setattr(linear, "LEAST", 8)
        monkeypatch.setattr(extend, "LEAST", 8)
    model = MODELS[name]
    for n_texts in (1, 3, 4):
        require_exact(model, n_texts)
    assert len(ran) == 3 * 5 * N_MODELS


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout(layout: Callable[[Array], Array], ran: list[int]) -> None:
    for name in ("learned positions", "a head of its own"):
        require_exact(MODELS[name], 2, layout)
    assert len(ran) == 2 * 5 * N_MODELS


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, extend):
        monkeypatch.setattr(module, "LEAST", 8)
    model = MODELS["a head of its own"]
    params, found = of_float32(model), []
    for n in (1, 2, 3):
        with threadpoolctl.threadpool_limits(n, user_api="blas"):
            found.append(continued(model, params, 2))
    for others in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_every_token_has_logits() -> None:
    model = MODELS["learned positions"]
    params = of_float32(model)
    _, state = model.extend(params, np.ones((2, 3), int), model.start())
    one, _ = model.extend(params, np.ones((2, 1), int), state)
    every, _ = model.extend(params, np.ones((2, 1), int), state, every=True)
    assert every.shape == (2, 1, V) and np.array_equal(every[:, 0], one)


@pytest.mark.parametrize("name", ["learned positions", "rotary"])
def test_a_long_text(name: str, ran: list[int]) -> None:
    """Through rooms that are made anew, and positions with them."""
    n = 2 * LEAST + 9
    model = MODELS[name]
    if model.embed is not None and model.embed.max_len is not None:
        model = replace(model, embed=replace(model.embed, max_len=n))
    params = of_float32(model)
    ids = np.random.default_rng(2).integers(0, V, (1, n))
    _, state = model.extend(params, ids[:, :2], model.start())
    got = []
    for i in range(2, n):
        logits, state = model.extend(params, ids[:, i : i + 1], state)
        got.append(logits[0])
    assert len(ran) == n - 2 and isinstance(state.past, Together)
    with reference_only():
        wanted, _ = model.extend(params, ids, model.start(), every=True)
    np.testing.assert_allclose(np.array(got), wanted[0, 2:], rtol=1e-3, atol=1e-3)


def test_the_same_texts(ran: list[int]) -> None:
    """As of the reference, greedy, of several prompts, each in its own order of threads."""
    gpt = GPT(V, 2, 12, 3, 40)
    params = of_float32(gpt)
    got = generate(gpt, params, [[1, 2, 3], [4, 5, 6]], max_new=30)
    assert len(ran) == 29
    with reference_only():
        assert got == generate(gpt, params, [[1, 2, 3], [4, 5, 6]], max_new=30)


CAPPED = LMHead(softcap=5.0)
TYPED = replace(PLAIN, n_types=2)
OTHERS: dict[str, tuple[Any, str]] = {
    "sinusoidal": (GPT(V, 2, 12, 3, 40, positions="sinusoidal"), "neither learned nor rotary"),
    "qkv": (GPT(V, 2, 12, 3, 40, position_mode="qkv"), "more than a token's"),
    "types": (LanguageModel(TYPED, BLOCKS), "more than a token's"),
    "a norm of vectors": (
        LanguageModel(replace(PLAIN, norm=NormConfig("layer")), BLOCKS),
        "more than a token's",
    ),
    "relative": (
        LanguageModel(PLAIN, BLOCKS, relative=RelativeConfig(3, 8, 16, bidirectional=False)),
        "relative",
    ),
    "wider": (LanguageModel(EmbedConfig(V, 8, 12, positions="none"), BLOCKS,
              head=LMHead(tied=False)), "more than a token's"),
    "capped": (LanguageModel(PLAIN, BLOCKS, head=CAPPED), "scaled or capped"),
    "scaled": (LanguageModel(PLAIN, BLOCKS, head=LMHead(scale=0.5)), "scaled or capped"),
    "alibi": (LanguageModel(PLAIN, BLOCKS, alibi=True), "a bias of scores"),
    "window": (LanguageModel(PLAIN, (replace(BLOCKS[0], window=(3, None)),) * 2), "a window"),
    "shaw": (LanguageModel(PLAIN, (replace(BLOCKS[0], shaw=2),) * 2), "Shaw's positions"),
    "post-norm": (LanguageModel(EMBED, (replace(BLOCKS[0], norm="post"),) * 2), "post-LN"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_it_leaves(name: str, ran: list[int]) -> None:
    model, why = OTHERS[name]
    network = getattr(model, "network", model)
    params = of_float32(model)
    _, state = network.extend(params, np.ones((1, 3), int), network.start())
    assert why in (why_not(model, params, state, np.ones((1, 1), int)) or "")
    require_exact(network)
    assert not ran


def test_texts_that_it_leaves() -> None:
    model = MODELS["learned positions"]
    params = of_float32(model)
    one, text = np.ones((1, 1), int), np.ones((1, 3), int)
    _, state = model.extend(params, text, model.start())
    _, padded = model.extend(params, text, model.start(), mask=np.array([[False, True, True]]))
    double = tree.map(lambda p: p.astype(np.float64), params)
    _, wide = model.extend(double, text, model.start())
    _, five = model.extend(params, np.ones((5, 3), int), model.start())
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("padding", (params, padded, one), {}),
        ("padding", (params, state, one), {"mask": np.ones((1, 1), bool)}),
        ("padding, or fixed columns", (params, state.in_columns(8), one), {}),
        ("not one token", (params, state, text), {}),
        ("not one token", (params, model.start(), one), {}),
        ("not one token", (params, five, np.ones((5, 1), int)), {}),
        ("not one token", (params, model.rewind(state, 1), one), {}),
        ("only NumPy's own arrays of float32", (double, wide, one), {}),
        ("as many keys as the text", (params, state._replace(length=9), one), {}),
        ("keys and values of another kind", (params, wide, one), {}),
        ("keys and values of another kind", (params, state, np.ones((2, 1), int)), {}),
        ("no integers", (params, state, np.ones((1, 1))), {}),
        ("tokens that the model has not", (params, state, np.full((1, 1), V)), {}),
        ("tokens that the model has not", (params, state, np.full((1, 1), -1)), {}),
    ]
    _, grown = model.extend(params, one, state)
    shallow = replace(model, blocks=BLOCKS[:1])
    _, low = shallow.extend(of_float32(shallow), text, shallow.start())
    table = params.embed._replace(table=params.embed.table[:-1])
    cases += [
        ("keys and values of another kind", (params, grown, np.ones((2, 1), int)), {}),
        ("not one token", (params, low, one), {}),
        (
            "of shape (36, 12) in the place of (37, 12)",
            (params._replace(embed=table), state, one),
            {},
        ),
    ]
    assert why_not(model, params, state, one) is None
    wide_turns = LanguageModel(PLAIN, BLOCKS, rotary=RopeConfig(6))  # of heads of four numbers
    plain = of_float32(MODELS["rotary"])
    _, turned = MODELS["rotary"].extend(plain, text, MODELS["rotary"].start())
    assert "rotary positions" in (why_not(wide_turns, plain, turned, one) or "")
    for wanted, (weights, past, tokens), options in cases:
        why = why_not(model, weights, past, tokens, **options)
        assert wanted in (why or ""), (wanted, why)
    with pytest.raises(ValueError, match=r"must lie in \[0, 37\), got ids from 37 to 37"):
        model.extend(params, np.full((1, 1), V), state)
    with pytest.raises(ValueError, match="batch size of the state, 1, got 2"):
        model.extend(params, np.ones((2, 1), int), state)
    text_of_it = dispatch.explain(language_model_extend, one, params, model=model, state=state)
    assert "numba.extend.language_model_extend" in text_of_it.splitlines()[0]


def test_frequencies_that_change_with_the_length(ran: list[int]) -> None:
    """Dynamic ones: the kernel reads as many tokens as have the first ones."""
    rotary = RopeConfig(4, scaling="dynamic", factor=2.0, max_len=6)
    model = LanguageModel(PLAIN, BLOCKS, rotary=rotary)
    require_exact(model, 2)  # of nine tokens, five of them one by one
    assert len(ran) == 2 * N_MODELS


def test_other_weights_and_another_model_for_the_same_text(ran: list[int]) -> None:
    model = MODELS["learned positions"]
    params = of_float32(model)
    _, state = model.extend(params, np.ones((1, 3), int), model.start())
    _, state = model.extend(params, np.ones((1, 1), int), state)
    doubled = tree.map(lambda p: 2 * p, params)
    untied = MODELS["a head of its own"]
    heads = params._replace(head=of_float32(untied).head)
    narrow = replace(model, blocks=(replace(BLOCKS[0], n_heads=3, d_head=4),) * 2)
    for other, weights in ((model, doubled), (untied, heads), (narrow, params)):
        got, _ = other.extend(weights, np.zeros((1, 1), int), state)
        with reference_only():
            wanted, _ = other.extend(weights, np.zeros((1, 1), int), state)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    assert len(ran) == 4
    groups = replace(model, blocks=(replace(BLOCKS[0], d_head=6),) * 2)
    assert why_not(groups, of_float32(groups), state, np.ones((1, 1), int)) is not None


def test_weights_that_are_written_over() -> None:
    """In place: the next token sees them."""
    model = MODELS["rotary"]
    params = of_float32(model)
    _, state = model.extend(params, np.ones((1, 3), int), model.start())
    _, state = model.extend(params, np.ones((1, 1), int), state)
    params.embed.table[:] *= 0.5
    got, _ = model.extend(params, np.zeros((1, 1), int), state)
    with reference_only():
        wanted, _ = model.extend(params, np.zeros((1, 1), int), state)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_pasts_are_made_when_somebody_looks() -> None:
    model = MODELS["learned positions"]
    params = of_float32(model)
    ids = np.random.default_rng(0).integers(0, V, (2, 5))
    _, state = model.extend(params, ids[:, :4], model.start())
    _, state = model.extend(params, ids[:, 4:], state)
    past: Any = state.past
    assert isinstance(past, Together) and len(past) == 2 and not past._made
    with reference_only():
        _, wanted = model.extend(params, ids, model.start())
    for copied in (past, tuple(past), copy.deepcopy(past), pickle.loads(pickle.dumps(past))):
        for one, other in zip(copied, wanted.past, strict=True):
            assert one.length == 5
            np.testing.assert_allclose(one.k, other.k, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(one.v, other.v, rtol=1e-4, atol=1e-5)
    assert past[0] is past[-2] and past[1:] == (past[1],)
    with pytest.raises(IndexError):
        past[2]
    kept = [own.k.copy() for own in past]
    model.extend(params, ids[:, :1], state._replace(past=tuple(past)))  # goes on in the same rooms
    _, other = model.extend(params, ids[:, 1:2], state)  # and this one in others
    assert all(np.array_equal(own.k, k) for own, k in zip(past, kept, strict=True))
    assert other.past.rooms[0] is not past.rooms[0]


def test_small_and_large_models_go_on_after_each_other() -> None:
    """One on all threads, from whose loops another thread may come back late, and one on one."""
    small_one, small_params = small("layer norms")
    large = GPT(V, 2, 256, 4, 64)
    params = tree.map(lambda p: p.astype(np.float32), large.init(0))
    texts = []
    for _ in range(3):
        _, state = small_one.extend(small_params, np.ones((1, 2), int), small_one.start())
        _, wide = large.network.extend(params, np.ones((1, 2), int), large.network.start())
        logits = []
        for i in range(20):
            one, state = small_one.extend(small_params, np.full((1, 1), i), state)
            other, wide = large.network.extend(params, np.full((1, 1), i), wide)
            logits += [one, other]
        texts.append(logits)
    for again in texts[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(texts[0], again, strict=True))


def test_families(ran: list[int]) -> None:
    """Real ones that it reads whole."""
    for name in ("gpt2", "llama"):
        model, _ = causal(name)
        require_exact(getattr(model, "network", model), 2)
    assert len(ran) == 2 * 5 * N_MODELS
