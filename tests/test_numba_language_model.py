"""A share of the texts from tokens to losses, and back: the reference's numbers of every model."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from test_numba_advance import LAYOUTS as LYING
from test_numba_share import require_nobody_waits

from xformer import GPT, Key, backends, inference, layers, reference_only, tree
from xformer.dispatch import explain
from xformer.layers import BlockConfig, EmbedConfig, RopeConfig
from xformer.models import LanguageModel, LMHead
from xformer.models.language_model import language_model_loss
from xformer.typing import Array

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import language_model as kernel
from xformer.backends.numba import language_model_plan
from xformer.backends.numba.known import Known

V, D = 31, 24
BLOCK = BlockConfig(D, 4, 40, activation="gelu_tanh")
LLAMA = BlockConfig(
    D, 4, 40, n_kv_heads=2, activation="silu", gated=True, norm_kind="rms", bias=False
)
GPT2 = LanguageModel(EmbedConfig(V, D, D, 70, "learned"), (BLOCK,) * 2)
NOWHERE = EmbedConfig(V, D, D, positions="none")
MODELS = {
    "GPT-2": GPT2,
    "Llama": LanguageModel(NOWHERE, (LLAMA,) * 2, rotary=RopeConfig(6), head=LMHead(tied=False)),
    "a bias of the head": replace(GPT2, head=LMHead(tied=False, bias=True)),
    "no final norm": replace(GPT2, final_norm=False),
    "positions from the third row on": replace(
        GPT2, embed=EmbedConfig(V, D, D, 95, "learned", offset=2)
    ),
    "shared blocks": replace(GPT2, blocks=(BLOCK,) * 4, n_groups=2),
    "both ways, windows": replace(
        GPT2, causal=False, blocks=(replace(BLOCK, window=(3, 2), eps=0.1), BLOCK)
    ),
    "interleaved, biases": LanguageModel(
        NOWHERE,
        (replace(BLOCK, norm_kind="rms", norm_offset=1.0),),
        rotary=RopeConfig(4, interleaved=True),
    ),
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"label_smoothing": 0.1},
    {"z_loss": 0.01, "reduction": "sum", "ignore_index": None},
    {"label_smoothing": 1.0},
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    backends.get("numba")
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        yield


def drawn(model: Any, seed: int = 3) -> Any:
    """Parameters far from the first, in float32."""
    rng = np.random.default_rng(seed)
    return tree.map(lambda p: (p + rng.normal(0, 0.3, p.shape)).astype(np.float32), model.init())


def texts(n: int, length: int, seed: int = 0) -> tuple[Array, Array]:
    ids = np.random.default_rng((n, length, seed)).integers(0, V, (n, length + 1))
    return ids[:, :-1], ids[:, 1:]


def results(
    model: Any, params: Any, given: tuple[Array, Array], dloss: float | None = None, **options: Any
) -> dict[str, Array]:
    """The loss, and gradients of all parameters."""
    loss, cache = model.loss(params, *given, **options)
    grads = cache.backward(None if dloss is None else np.asarray(dloss, loss.dtype))
    assert tree.map(np.shape, grads) == tree.map(np.shape, params)
    assert tree.beside(grads, params) is not None  # of the same types
    return {"loss": np.asarray(loss)} | tree.flatten(grads)


def runs_here(model: Any, params: Any, given: tuple[Array, Array], **options: Any) -> bool:
    text = explain(language_model_loss, *given, params, model=model, **options)
    return "numba.language_model.language_model_loss" in text.splitlines()[0]


def require_exact(
    model: Any, params: Any, given: tuple[Array, Array], dloss: float | None = None, **options: Any
) -> None:
    """Within twice the reference's distance from float64, by the mean square over all arrays."""
    assert runs_here(model, params, given, **options)
    got = results(model, params, given, dloss, **options)
    wide = tree.map(lambda p: p.astype(np.float64), params)
    with reference_only():
        plain = results(model, params, given, dloss, **options)
        exact = results(model, wide, given, dloss, **options)
    assert got.keys() == exact.keys()

    def size(a: Array) -> float:
        return float(np.sqrt(np.mean(a.astype(np.float64) ** 2)))

    # A key's bias changes no probability: its gradient is what rounding leaves of the query's.
    sizes = {
        name: max(size(a), size(exact[name.replace("kv.k.b", "q.b")])) for name, a in exact.items()
    }
    for name, a in got.items():
        assert a.dtype == np.float32 and a.shape == exact[name].shape
        assert size(a - exact[name]) < 1e-4 * sizes[name], name
    off, off_plain = (
        size(np.array([size(a[name] - exact[name]) / sizes[name] for name in exact]))
        for a in (got, plain)
    )
    assert off <= 2 * off_plain + 4 * np.finfo(np.float32).eps


@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = drawn(MODELS[name])
    for n, length in ((2, 128), (4, 65), (6, 70)):
        if length <= (MODELS[name].context or length):
            require_exact(MODELS[name], params, texts(n, length))
    monkeypatch.setattr(kernel, "LOGITS", 50 * V)  # in several chunks, the last of which is shorter
    require_exact(MODELS[name], params, texts(4, 66), dloss=-0.7)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
@pytest.mark.parametrize("name", ["GPT-2", "a bias of the head"])
def test_every_loss(name: str, options: dict[str, Any]) -> None:
    require_exact(MODELS[name], drawn(MODELS[name]), texts(4, 65), **options)


@pytest.mark.parametrize("layout", LYING, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", ["GPT-2", "a bias of the head"])
def test_weights_that_lie_otherwise(name: str, layout: Any) -> None:
    """The head's gradient lies as it does, as far as an array of its own can."""
    params = tree.map(lambda p: layout(p) if p.ndim == 2 else p, drawn(MODELS[name]))
    require_exact(MODELS[name], params, texts(4, 65))


def test_tokens_of_every_kind() -> None:
    """Of other types, read-only, or apart; none is written to."""
    params, (tokens, targets) = drawn(GPT2), texts(4, 65)
    wanted = results(GPT2, params, (tokens, targets))
    for dtype in (np.uint8, np.int32, np.uint64):
        given = tokens.astype(dtype), targets.astype(dtype)
        for x in given:
            x.flags.writeable = False
        assert runs_here(GPT2, params, given)
        got = results(GPT2, params, given)
        assert all(np.array_equal(got[name], a) for name, a in wanted.items())
    apart = tuple(np.repeat(x, 2, axis=1)[:, ::2] for x in (tokens, targets))
    got = results(GPT2, params, apart)
    assert all(np.array_equal(got[name], a) for name, a in wanted.items())


def test_ids_out_of_range_are_refused() -> None:
    params, (tokens, targets) = drawn(GPT2), texts(4, 65)
    for wrong in (-1, V):
        bad = tokens.copy()
        bad[1, 2] = wrong
        with pytest.raises(ValueError, match=r"ids must lie in \[0, 31\)"):
            GPT2.loss(params, bad, targets)
        with pytest.raises(ValueError, match=r"targets must lie in \[0, 31\)"):
            GPT2.loss(params, tokens, bad)
    with pytest.raises(ValueError, match="at most max_len = 70 tokens fit"):
        GPT2.loss(params, *texts(4, 71))


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """Judged by the loss itself in float64."""
    model, given = MODELS[name], texts(4, 64)
    params = model.init(0)
    assert runs_here(model, params, given)
    loss, cache = model.loss(params, *given)
    grads = tree.flatten(cache.backward())
    wide = tree.map(lambda p: p.astype(np.float64), params)
    assert abs(float(loss) - float(model.loss(wide, *given)[0])) < 1e-6

    def ahead(way: Any, h: float) -> float:
        moved = tree.map(lambda p, d: p + h * d, wide, way)
        return float(model.loss(moved, *given)[0])

    for step in range(3):
        rng = np.random.default_rng(step)
        leaves = {key: rng.normal(size=p.shape) for key, p in tree.flatten(wide).items()}
        way = tree.unflatten(wide, leaves)
        found = sum(float(np.sum(grads[key] * d)) for key, d in leaves.items())
        slope = (ahead(way, 1e-6) - ahead(way, -1e-6)) / 2e-6
        assert found == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("name", ["GPT-2", "a bias of the head"])
def test_a_backward_may_come_twice_and_late(name: str) -> None:
    """Whoever writes over its gradients, and whatever else has run."""
    model, params = MODELS[name], drawn(MODELS[name])
    _, cache = model.loss(params, *texts(4, 65))
    first = {key: g.copy() for key, g in tree.flatten(cache.backward()).items()}
    _, other = model.loss(params, *texts(4, 65, seed=1))
    for g in tree.flatten(other.backward()).values():
        g[:] = np.nan
    for _ in range(2):
        grads = tree.flatten(cache.backward())
        for key, got in grads.items():
            assert np.array_equal(got, first[key]), key
            got[:] = np.nan


@pytest.mark.parametrize("name", ["GPT-2", "a bias of the head"])
@pytest.mark.parametrize("layout", LYING, ids=lambda layout: layout.__name__)
def test_a_cache_is_copied_with_its_weights(layout: Any, name: str) -> None:
    """Of which it knows the place: by a pickle, whose weights are elsewhere, and they are gone.

    And may lie otherwise: what has gaps has none then.
    """
    model, params = MODELS[name], drawn(MODELS[name])
    params = tree.map(lambda p: layout(p) if p.ndim == 2 else p.copy(), params)
    assert runs_here(model, params, texts(4, 65))
    _, cache = model.loss(params, *texts(4, 65))
    wanted = {key: g.copy() for key, g in tree.flatten(cache.backward()).items()}
    kept = pickle.dumps(cache)
    for leaf in tree.flatten(params).values():
        leaf[:] = np.nan
    for copied in (pickle.loads(kept), copy.deepcopy(pickle.loads(kept))):
        for key, got in tree.flatten(copied.backward()).items():
            assert np.array_equal(got, wanted[key]), key


def test_what_is_known_goes_with_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model_plan, "_known", known := Known())
    params, given = drawn(GPT2), texts(4, 65)
    first = results(GPT2, params, given)["loss"]
    wider = replace(GPT2, blocks=(replace(BLOCK, eps=0.5),) * 2)  # of the same parameters
    assert results(wider, params, given)["loss"] != first
    assert results(replace(GPT2), params, given)["loss"] == first and len(known) == 1
    del params
    gc.collect()
    assert len(known) == 0


def test_shares_add_in_their_order() -> None:
    """Of three, the last of which is smaller: the same bits whichever is ready first."""
    model = MODELS["positions from the third row on"]
    params, given = drawn(model), texts(8, 90)
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        require_exact(model, params, given)
        _, cache = model.loss(params, *given)
        assert isinstance(cache.model, kernel.SharesCache) and len(cache.model.kept) == 3
        wanted = tree.flatten(cache.backward())
        for _ in range(20):
            for key, got in tree.flatten(cache.backward()).items():
                assert np.array_equal(got, wanted[key]), key
    with threadpoolctl.threadpool_limits(1, user_api="blas"):  # one after the other
        for key, got in tree.flatten(cache.backward()).items():
            assert np.array_equal(got, wanted[key]), key


def test_nobody_waits_for_a_share_that_failed() -> None:
    """When it was taken: its gradients of the embedding never come."""
    _, cache = GPT2.loss(drawn(GPT2), *texts(4, 65))
    wanted = tree.flatten(cache.backward())
    require_nobody_waits(kernel.loops, cache.backward)
    for key, got in tree.flatten(cache.backward()).items():
        assert np.array_equal(got, wanted[key]), key


def test_tokens_may_change_before_the_backward() -> None:
    params, (tokens, targets) = drawn(GPT2), texts(4, 65)
    _, cache = GPT2.loss(params, tokens, targets)
    wanted = tree.flatten(cache.backward())
    tokens[:], targets[:] = 10**9, -1
    for key, got in tree.flatten(cache.backward()).items():
        assert np.array_equal(got, wanted[key]), key


def test_a_model_of_ones_own_is_asked_itself() -> None:
    class Doubled(LanguageModel):
        def hidden(self, *args: Any, **options: Any) -> Any:
            y, cache = super().hidden(*args, **options)
            return 2 * y, cache

    params, given = drawn(GPT2), texts(4, 65)
    model = Doubled(GPT2.embed, GPT2.blocks)
    assert kernel.outside(*given, params, model=model) == "a model of another kind"
    with reference_only():
        wanted = model.loss(params, *given)[0]
    assert model.loss(params, *given)[0] == pytest.approx(float(wanted), rel=1e-5)


def test_a_ledger_is_the_same() -> None:
    """It asks the cache for that of the head."""
    from xformer.ledger import ledger

    model = GPT(V, n_layers=2, d_model=32, n_heads=4, max_len=64)
    assert runs_here(model.network, model.init(), texts(8, 64))
    assert ledger(model, batch=8, length=64).loss_work > 0


def test_a_wrong_gradient_is_refused() -> None:
    loss, cache = GPT2.loss(drawn(GPT2), *texts(4, 65))
    with pytest.raises(TypeError, match="dloss must be float32, got float64"):
        cache.backward(np.ones(()))
    with pytest.raises(ValueError, match="dloss must have shape"):
        cache.backward(np.ones(1, np.float32))
    with pytest.raises(ValueError, match="drouter_logits must be None"):
        cache.model.backward(np.ones((), loss.dtype), [np.ones(1)])


def test_explain_says_why_not() -> None:
    params, (tokens, targets) = drawn(GPT2), texts(4, 65)
    assert runs_here(GPT2, params, (tokens, targets))
    given: dict[str, Any] = {"tokens": tokens, "targets": targets, "params": params, "model": GPT2}
    with inference():
        assert "for a backward" in str(kernel.outside(**given))

    def of(model: Any, **more: Any) -> dict[str, Any]:
        return {"model": model, "params": model.init(), **more}

    block, embed = GPT2.blocks[0], GPT2.embed
    assert embed is not None
    post = (replace(block, norm="post"),) * 2
    dropped = (replace(block, dropout=0.1),) * 2
    hidden = (replace(block, hidden_dropout=0.1),) * 2
    embed_dropped = replace(embed, dropout=0.1)
    relative = layers.RelativeConfig(4)
    typed = params.embed._replace(types=np.zeros((2, D), np.float32))
    vectors = LanguageModel(None, GPT2.blocks, head=None)
    lora = layers.LinearParams(params.embed.table.T, None)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("a mask, positions", {"mask": np.ones(tokens.shape, bool)}),
        ("a mask, positions", {"positions": tokens}),
        ("no dropout", {"dropout_key": Key(1), "model": replace(GPT2, blocks=dropped)}),
        ("no dropout", {"dropout_key": Key(1), "model": replace(GPT2, out_dropout=0.1)}),
        ("no dropout", {"dropout_key": Key(1), "model": replace(GPT2, blocks=hidden)}),
        ("no dropout", {"dropout_key": Key(1), "model": replace(GPT2, embed=embed_dropped)}),
        ("no dropout", {"dropout_key": 5}),
        ("no tokens that are ignored", {"ignore_index": 3}),
        ("no tokens that are ignored", {"temperature": 3}),
        ('reduction "none"', {"reduction": "none"}),
        ("parameters of another kind", {"params": tuple(params)}),
        ("only NumPy's own arrays of integers", {"tokens": tokens.astype(np.float32)}),
        ("for each token one target", {"targets": targets[:, 1:]}),
        ("for each token one target", {"tokens": tokens[:0], "targets": targets[:0]}),
        ("1 sequences do not part", {"tokens": tokens[:1], "targets": targets[:1]}),
        ("2 sequences of 9 tokens", {"tokens": tokens[:, :9], "targets": targets[:, :9]}),
        ("only a table of tokens", of(replace(GPT2, embed=replace(embed, scale=2.0)))),
        ("only a table of tokens", of(replace(GPT2, embed=replace(embed, positions="sinusoidal")))),
        ("only a head of a product", of(replace(GPT2, head=LMHead(softcap=3.0)))),
        ("a head of another kind", {"params": params._replace(head=lora)}),
        ("NumPy's kernels", of(replace(GPT2, embed=replace(embed, vocab_size=5000)))),
        ("relative positions", of(replace(GPT2, alibi=True))),
        ("relative positions", of(replace(GPT2, relative=relative))),
        ("relative positions", of(replace(GPT2, checkpoint=True))),
        ("what is frozen", {"params": tree.freeze(params, "embed.positions")}),
        ("parameters that are not the model's", {"params": params._replace(embed=typed)}),
        ("vectors in the place", {"model": vectors}),
        ("no table of tokens", {"params": params._replace(embed=None)}),
        ("a stack of another kind", {"model": replace(GPT2, final_norm=False)}),
        ("a stack of another kind", {"model": replace(GPT2, blocks=(block,))}),
        ("an array of shape", {"model": replace(GPT2, embed=replace(embed, max_len=90))}),
        ("only norms before", of(replace(GPT2, blocks=post))),
        ("rotary positions", of(replace(GPT2, rotary=RopeConfig(8)))),
        ("only NumPy's own arrays of float32", {"params": tree.map(np.float64, params)}),
    ]
    assert kernel.outside(**given) is None
    for why, options in cases:
        text = kernel.outside(**given | options)
        assert text is not None and text.startswith(why), (why, text)
    long = GPT(V, n_layers=1, d_model=D, n_heads=4, max_len=64).network
    text = kernel.outside(tokens, targets, long.init(), model=long)
    assert text == "more tokens than fit the context"
