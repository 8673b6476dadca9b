"""A share of a batch in training: the reference's numbers, and its gradients, of every form."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from test_numba_advance import LAYOUTS as LYING
from test_numba_blocks import turned
from test_numpy_advance import FORMS, WIDE

from xformer import Key, backends, dispatch, inference, layers, reference_only, tree
from xformer.layers import BlockConfig
from xformer.layers.rotary import Rotary
from xformer.typing import Array

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import maps, share, share_layout
from xformer.backends.numba.plan import remembered
from xformer.backends.numpy.threads import lined

MODELS = {name: replace(WIDE, **options) for name, options in FORMS.items()} | {
    "gelu, values of another width": BlockConfig(24, 4, 40, activation="gelu", d_value=5),
    "relu, rms": BlockConfig(24, 4, 40, norm_kind="rms", n_kv_heads=2, norm_offset=1.0),
    "gelu, gated": BlockConfig(24, 4, 40, activation="gelu", gated=True, bias=False),
    "wide": BlockConfig(200, 4, 296, activation="gelu_tanh", n_kv_heads=2, d_head=34),
    "wide, silu": BlockConfig(200, 5, 264, activation="silu", gated=True, norm_kind="rms"),
}
MODELS = {name: c for name, c in MODELS.items() if c.norm == "pre"}
CAUSAL = (False, True)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    backends.get("numba")
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each batch that came to the kernel, and each that went back."""
    calls: list[str] = []

    def run(*args: Any, **options: Any) -> Any:
        calls.append("forward")
        y, cache = share.blocks(*args, **options)
        return y, Noted(cache)

    class Noted:
        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def backward(self, *given: Any) -> Any:
            calls.append("backward")
            return self.cache.backward(*given)

    kernels = layers.blocks.import_kernels("numpy")
    known = [k._replace(run=run) if k.run is share.blocks else k for k in kernels]
    monkeypatch.setitem(layers.blocks.kernels, "numpy", known)
    return calls


def drawn(*configs: BlockConfig) -> tuple[Any, tuple[BlockConfig, ...]]:
    """Parameters far from the first, in float32."""
    rng = np.random.default_rng(3)
    params = layers.StackParams.init(backends.get("numpy").generator(1, "float64"), configs).blocks
    noise = 0.3 if configs[0].d_model < 100 else 0.05
    moved = tree.map(lambda p: p + rng.normal(0, noise, p.shape), params)
    return tree.map(lambda p: p.astype(np.float32), moved), configs


def tokens(n_texts: int, length: int, width: int, seed: int = 0) -> Array:
    rng = np.random.default_rng((n_texts, seed))
    return rng.normal(size=(n_texts, length, width)).astype(np.float32)


def results(x: Array, params: Any, **options: Any) -> dict[str, Array]:
    """y, and gradients of x and of all parameters."""
    y, cache = layers.blocks(x, params, **options)
    dy = np.random.default_rng(9).normal(size=y.shape).astype(y.dtype)
    dx, dparams, *rest = cache.backward(dy)
    assert rest == [None] * 4
    assert tree.map(np.shape, dparams) == tree.map(np.shape, params)
    return {"y": y, "dx": dx} | tree.flatten(dparams)


def require_exact(x: Array, params: Any, **options: Any) -> None:
    """Within twice the reference's distance from float64, by the mean square over an array.

    Of several layers, which blow up what one number is off, over all arrays, each by its size.
    """
    got = results(x, params, **options)
    wide = tree.map(lambda p: p.astype(np.float64), params)
    turns = options.pop("rotary", None)
    exactly = None if turns is None else Rotary(*map(np.float64, turns[:2]), turns.interleaved)
    with reference_only():
        plain = results(x, params, rotary=turns, **options)
        exact = results(x.astype(np.float64), wide, rotary=exactly, **options)
    assert got.keys() == exact.keys()
    assert all(a.dtype == np.float32 and a.shape == exact[name].shape for name, a in got.items())

    def size(a: Array) -> float:
        return float(np.sqrt(np.mean(a.astype(np.float64) ** 2)))

    # A key's bias changes no probability: its gradient is what rounding leaves of the query's.
    sizes = {
        name: max(size(a), size(exact[name.replace("kv.k.b", "q.b")])) for name, a in exact.items()
    }
    off, off_plain = (
        np.array([size(a[name] - exact[name]) / sizes[name] for name in exact])
        for a in (got, plain)
    )
    if len(options["configs"]) > 1:
        off, off_plain = np.array([size(off)]), np.array([size(off_plain)])
    wrong = off > 2 * off_plain + 4 * np.finfo(np.float32).eps
    assert not wrong.any(), [(x, *y) for x, *y in zip(exact, off, off_plain, strict=False)]


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_form(name: str, n_layers: int, ran: list[str]) -> None:
    params, configs = drawn(*(MODELS[name],) * n_layers)
    sizes = ((2, 128), (4, 65), (6, 70))
    for causal in CAUSAL:
        for n_texts, length in sizes:
            x = tokens(n_texts, length, configs[0].d_model)
            require_exact(x, params, configs=configs, causal=causal)
    assert ran.count("forward") == ran.count("backward") == 2 * len(sizes)


@pytest.mark.parametrize("layout", LYING, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", ["layer norms", "wide, silu"])
def test_weights_that_lie_otherwise(name: str, layout: Any, ran: list[str]) -> None:
    """Their gradients lie as they do, as far as an array of their own can."""
    params, configs = drawn(MODELS[name])
    params = tree.map(layout, params)
    x = tokens(4, 70, configs[0].d_model)
    require_exact(x, params, configs=configs)
    _, cache = layers.blocks(x, params, configs=configs)
    grads = tree.flatten(cache.backward(x)[1])
    for key, w in tree.flatten(params).items():
        sideways = w.flags.f_contiguous and not w.flags.c_contiguous
        assert grads[key].flags.f_contiguous if sideways else grads[key].flags.c_contiguous
    assert "backward" in ran


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions(interleaved: bool, own: bool, ran: list[str]) -> None:
    for name in ("layer norms", "wide"):
        params, configs = drawn(*(MODELS[name],) * 2)
        turns = turned(4 if own else None, 66, interleaved=interleaved)
        require_exact(tokens(4, 66, configs[0].d_model), params, configs=configs, rotary=turns)
    assert ran.count("forward") == 2


@pytest.mark.parametrize("causal", CAUSAL)
def test_hidden_keys(causal: bool, ran: list[str]) -> None:
    mask = np.random.default_rng(0).random((4, 1, 1, 70)) < 0.7
    mask[0, ..., 9:], mask[1, ..., :9], mask[2] = False, False, False
    params, configs = drawn(MODELS["layer norms"])
    for hidden in (mask, mask[:1], np.ones_like(mask)):
        require_exact(tokens(4, 70, 24), params, configs=configs, causal=causal, mask=hidden)
    assert ran.count("forward") == 3


def test_layers_that_differ_and_share(ran: list[str]) -> None:
    first = replace(MODELS["layer norms"], eps=0.1, scale=0.7)
    second = replace(first, window=(2, 1), d_ff=36, d_head=8, activation="silu", gated=True, eps=1)
    third = replace(first, window=(None, 3), scale=-0.2, eps=1e-5)
    params, configs = drawn(first, second, third)
    x = tokens(4, 70, 24)
    require_exact(x, params, configs=configs)
    require_exact(x, params[:2], configs=(first, third, second, second))
    require_exact(x, params, configs=(third, second, first))  # the same parameters, other layers
    assert ran.count("forward") == 3


def test_a_cache_is_copied_with_its_weights(ran: list[str]) -> None:
    """Of which it knows the place: by a pickle, whose weights are elsewhere, and they are gone."""
    params, configs = drawn(*(MODELS["layer norms"],) * 2)
    x = tokens(4, 70, 24)
    _, cache = share.blocks(x, params, configs=configs)
    wanted = tree.flatten(cache.backward(x)[:2])
    kept = pickle.dumps(cache)
    for leaf in tree.flatten(params).values():
        leaf[:] = np.nan
    for copied in (pickle.loads(kept), copy.deepcopy(pickle.loads(kept))):
        for key, got in tree.flatten(copied.backward(x)[:2]).items():
            assert np.array_equal(got, wanted[key]), key


def test_sums_over_many_rows() -> None:
    """Of a bias, whose gradient is one of all tokens: in one go they would be 3e-4 off."""
    x = np.full((50_000, 3), 4 / 3, np.float32)
    maps._sum_rows(x, False, out := np.zeros(3, np.float32))
    maps._sum_rows(x, True, twice := out.copy())
    assert np.allclose(out, x.astype(np.float64).sum(axis=0), rtol=3e-5)
    assert np.allclose(twice, 2 * out, rtol=1e-4)


def test_without_norms(ran: list[str]) -> None:
    params, configs = drawn(MODELS["layer norms"])
    for part in ("attn_norm", "ffn_norm"):
        bare = tuple(p._replace(**{part: None}) for p in params)
        require_exact(tokens(4, 70, 24), bare, configs=configs, causal=True)
    assert ran.count("forward") == 2


def test_gradients_that_are_not_contiguous(ran: list[str]) -> None:
    """Nor are tokens, and neither is written to."""
    params, configs = drawn(MODELS["layer norms"])
    x = np.repeat(tokens(4, 70, 24), 2, axis=2)[..., ::2]
    dy = np.asfortranarray(tokens(4, 70, 24, seed=1))
    x.flags.writeable = dy.flags.writeable = False
    y, cache = layers.blocks(x, params, configs=configs)
    again, copied = layers.blocks(x.copy(), params, configs=configs)
    assert np.array_equal(y, again)
    wanted = tree.flatten(copied.backward(np.ascontiguousarray(dy))[:2])
    for key, got in tree.flatten(cache.backward(dy)[:2]).items():
        assert np.array_equal(got, wanted[key]), key


def test_a_wrong_gradient_is_refused(ran: list[str]) -> None:
    params, configs = drawn(MODELS["layer norms"])
    _, cache = layers.blocks(tokens(4, 70, 24), params, configs=configs)
    with pytest.raises(TypeError, match="blocks: dy must be float32, got float64"):
        cache.backward(np.zeros((4, 70, 24)))
    with pytest.raises(ValueError, match=r"blocks: dy must have shape"):
        cache.backward(np.zeros((4, 71, 24), np.float32))


def test_a_backward_may_come_twice_and_late(ran: list[str]) -> None:
    """Its memory is not of the next forward's."""
    params, configs = drawn(*(MODELS["layer norms"],) * 2)
    x, other = tokens(4, 70, 24), tokens(4, 70, 24, seed=5)
    _, cache = layers.blocks(x, params, configs=configs)
    first = tree.flatten(cache.backward(x)[:2])
    layers.blocks(other, params, configs=configs)[1].backward(other)
    for key, got in tree.flatten(cache.backward(x)[:2]).items():
        assert np.array_equal(got, first[key]), key


def test_explain_says_why_not() -> None:
    params, configs = drawn(MODELS["layer norms"])
    x = tokens(4, 70, 24)
    text = dispatch.explain(layers.blocks, x, params, configs=configs)
    assert text.startswith("blocks on numpy: xformer.backends.numba.share")
    with inference():
        assert "for a backward" in str(share.outside(x, params, configs=configs))
    frozen = tuple(tree.freeze(p, "attn.q.w") for p in params)
    gainless = params[0]._replace(attn_norm=params[0].attn_norm._replace(w=None))
    outer = (params[0]._replace(attn_out_norm=params[0].attn_norm),)
    given: dict[str, Any] = {"x": x, "params": params, "configs": configs}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("no checkpoints", {"checkpoint": True}),
        ("a memory, a bias", {"bias": np.zeros((1, 1, 70, 70), np.float32)}),
        ("only norms before", {"configs": (replace(configs[0], norm="post"),)}),
        ("only norms before", {"params": outer}),
        ("what is frozen has no gradient", {"params": frozen}),
        ("no dropout", {"dropout_key": Key(1), "configs": (replace(configs[0], dropout=0.1),)}),
        ("a norm without a gain", {"params": (gainless,)}),
        ("only masks of keys", {"mask": np.ones((70, 70), bool)}),
        ("only NumPy's own arrays of float32", {"x": x.astype(np.float64)}),
        ("1 sequences do not part evenly", {"x": x[:1]}),
        ("2 sequences of 9 tokens are too little", {"x": x[:, :9]}),
    ]
    assert share.outside(**given) is None
    for why, options in cases:
        text = share.outside(**given | options)
        assert text is not None and text.startswith(why), (why, text)


def test_few_layouts_are_remembered() -> None:
    """Of one plan, whatever the number of tokens; and each is right again."""
    params, configs = drawn(MODELS["gelu, gated"])
    plan = remembered(params, configs)
    wanted = share_layout.layout_of(plan, params, 3)
    for n in range(1, 3 * share_layout.REMEMBERED):
        share_layout.layout_of(plan, params, n)
    assert plan.layouts is not None and len(plan.layouts) <= share_layout.REMEMBERED
    got = share_layout.layout_of(plan, params, 3)
    assert got.pairs == wanted.pairs
    for name in ("starts", "rooms", "dmaps", "dnorms", "totals"):
        assert np.array_equal(getattr(got, name), getattr(wanted, name)), name


def test_what_is_frozen_is_left_to_the_ops(ran: list[str]) -> None:
    params, configs = drawn(MODELS["layer norms"])
    x = tokens(4, 70, 24)
    frozen = tuple(tree.freeze(p, "attn.q.w") for p in params)
    _, cache = layers.blocks(x, frozen, configs=configs)
    grads = cache.backward(x)[1]
    assert not ran and grads[0].attn.q.w is None and grads[0].attn.q.b is not None


TIED = {"layers of their own": 3, "layers that share": 1}


@pytest.mark.parametrize("n_blocks", TIED.values(), ids=TIED)
def test_shares_add_in_their_order(n_blocks: int) -> None:
    """Of three, the last of which is smaller: the same bits whichever is ready first."""
    params, configs = drawn(*(MODELS["gelu, gated"],) * 3)
    x = tokens(8, 90, 24)
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        require_exact(x, params[:n_blocks], configs=configs, causal=True)
        _, cache = layers.blocks(x, params[:n_blocks], configs=configs)
        assert isinstance(cache, share.SharesCache) and cache.kept.shape[0] == 3
        wanted = tree.flatten(cache.backward(x)[:2])
        for _ in range(20):
            for key, got in tree.flatten(cache.backward(x)[:2]).items():
                assert np.array_equal(got, wanted[key]), key
    with threadpoolctl.threadpool_limits(1, user_api="blas"):  # one after the other
        for key, got in tree.flatten(cache.backward(x)[:2]).items():
            assert np.array_equal(got, wanted[key]), key


def test_a_share_that_fails_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    params, configs = drawn(*(MODELS["layer norms"],) * 2)
    x = tokens(4, 70, 24)
    _, cache = layers.blocks(x, params, configs=configs)
    loops, wanted = share.share_loops.backward, tree.flatten(cache.backward(x)[1])
    for failing in (1, 2):
        calls = []

        def backward(*given: Any, failing: int = failing, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == failing:
                raise MemoryError("no room")
            loops(*given)

        monkeypatch.setattr(share.share_loops, "backward", backward)
        with pytest.raises(MemoryError, match="no room"):
            cache.backward(x)
    monkeypatch.setattr(share.share_loops, "backward", loops)
    for key, got in tree.flatten(cache.backward(x)[1]).items():
        assert np.array_equal(got, wanted[key]), key


def require_nobody_waits(module: Any, backward: Callable[[], Any]) -> None:
    """Of a cache, by `module.backward`: one share is taken and fails, and another has begun."""
    loops, first = module.backward, threading.Lock()
    taken, other = threading.Event(), threading.Event()

    def failing(*given: Any) -> None:
        if first.acquire(blocking=False):
            given[-1][-1, 0] += 1  # share 0 is taken
            taken.set()
            assert other.wait(timeout=60)  # who has not begun after an error never does
            raise MemoryError("no room")
        assert taken.wait(timeout=60)
        other.set()
        loops(*given)

    errors: list[BaseException] = []

    def run() -> None:
        with pytest.raises(MemoryError, match="no room") as raised:
            backward()
        errors.append(raised.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "backward", failing)
        waiting = threading.Thread(target=run, daemon=True)
        waiting.start()
        waiting.join(timeout=60)
    assert errors and not waiting.is_alive()


def test_nobody_waits_for_a_share_that_failed_when_it_was_taken() -> None:
    """As one does for which there is no memory within the loops."""
    params, configs = drawn(*(MODELS["layer norms"],) * 2)
    x = tokens(4, 70, 24)
    _, cache = layers.blocks(x, params, configs=configs)
    require_nobody_waits(share.share_loops, lambda: cache.backward(x))


def test_there_are_no_layers_and_no_routers() -> None:
    params, configs = drawn(MODELS["layer norms"])
    _, cache = layers.blocks(tokens(4, 70, 24), params, configs=configs)
    with pytest.raises(AttributeError, match="each thread took its sequences"):
        _ = cache.blocks
    with pytest.raises(ValueError, match="drouter_logits must be None"):
        cache.backward(tokens(4, 70, 24), [tokens(1, 1, 1)])


def test_arrays_begin_with_a_line() -> None:
    """Else each vector of 16 numbers would lie in two."""
    params, configs = drawn(*(MODELS["wide"],) * 2)
    _, cache = layers.blocks(tokens(4, 70, 200), params, configs=configs)
    for row in cache.kept:
        assert row.ctypes.data % 64 == 0
    for shape in ((3, 5), (0,), (1 << 12,)):
        found = lined(shape, np.float32)
        assert found.ctypes.data % 64 == 0 and found.shape == shape and found.flags.c_contiguous
