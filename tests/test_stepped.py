"""`xf.stepped`: an update in the backward has the bits of one after it, and needs less memory."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from libraries import only

import xformer as xf
from xformer import optim, tree
from xformer.backends import Backend
from xformer.layers import EmbedConfig, ExpertsConfig
from xformer.models import EncoderDecoder, LanguageModel, LMHead

GPT = xf.GPT(vocab_size=17, n_layers=3, d_model=16, n_heads=2, max_len=8)
TOKENS, TARGETS = np.random.default_rng(0).integers(0, 17, (2, 3, 8))
EMBED = EmbedConfig(17, 16, 16, 8)
BLOCK = block_config(d_model=16, n_heads=2, d_ff=8)
MIXED = block_config(d_model=16, n_heads=2, d_ff=8, experts=ExpertsConfig(3, 2, 5))
PARALLEL = block_config(d_model=16, n_heads=2, d_ff=8, parallel=True)
MODELS = {
    "tied": GPT,
    "untied": xf.GPT(17, 3, 16, 2, 8, tied=False),
    "checkpointed": xf.GPT(17, 3, 16, 2, 8, activation_checkpointing=True),
    "softcap": LanguageModel(EMBED, (BLOCK,) * 2, head=LMHead(tied=False, softcap=3.0)),
    "experts": LanguageModel(EMBED, (MIXED,) * 2, load_balancing_weight=0.1),
    "parallel": LanguageModel(EMBED, (PARALLEL,) * 2),
    "groups": LanguageModel(EMBED, (BLOCK,) * 4, n_shared_layer_groups=2),
    "Transformer": xf.Transformer(17, 17, 16, 2, 2, 1, 8, shared_memory=True),
}


def flat(params: Any) -> dict[str, Any]:
    return {name: tree.value(leaf) for name, leaf in tree.flatten(params).items()}


def cache_of(model: Any, params: Any) -> Any:
    with xf.unfused():
        is_pair = isinstance(model, EncoderDecoder)
        return model.loss(params, TOKENS, *[TOKENS][:is_pair], TARGETS)[1]


def descent(name: str, params: Any, grads: Any) -> Any:
    return optim.sgd(params, grads, optim.sgd_init(params), lr=0.1)[0]


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_sgd(name: str, donate: bool) -> None:
    model = MODELS[name]
    params = model.init(seed=0)
    before = tree.map(np.copy, params)
    wanted = flat(descent("", before, cache_of(model, before).backward()))
    new = xf.stepped(cache_of(model, params), params, descent, donate=donate)
    assert type(new) is type(params)
    assert flat(new).keys() == wanted.keys()
    for leaf, array in flat(new).items():
        assert np.array_equal(array, wanted[leaf]), leaf
        assert (array is flat(params)[leaf]) == donate
    if not donate:
        assert all(np.array_equal(a, flat(before)[leaf]) for leaf, a in flat(params).items())


def test_the_order_of_the_parts() -> None:
    """From the last layer to the first, then the rest; layers that share parameters at the end."""

    def order(name: str) -> list[str]:
        model, seen = MODELS[name], list[str]()

        def update(part: str, params: Any, grads: Any) -> Any:
            assert flat(params).keys() == flat(grads).keys()
            seen.append(part)
            return params

        params = model.init(seed=0)
        xf.stepped(cache_of(model, params), params, update)
        return seen

    layers = ["stack.blocks.2", "stack.blocks.1", "stack.blocks.0"]
    assert order("tied") == [*layers, ""]
    assert order("untied") == ["head", *layers, ""]
    assert order("groups") == [""]
    decoder = [name for name in order("Transformer") if name.startswith("decoder")]
    assert decoder == ["decoder.blocks.0"]


def test_frozen_parameters() -> None:
    params = tree.freeze(GPT.init(seed=0), "embed.*", "stack.blocks.1.*")
    cache = cache_of(GPT, params)
    trained = tree.trained(params)
    wanted = tree.join(params, descent("", trained, cache.backward()))
    new = xf.stepped(cache, params, descent)
    assert all(np.array_equal(a, flat(wanted)[name]) for name, a in flat(new).items())
    assert tree.frozen(new).keys() == tree.frozen(params).keys()


def test_a_state_for_each_part() -> None:
    """AdamW, whose rule is for one parameter at a time."""
    params = GPT.init(seed=0)
    state = optim.adamw_init(params)
    states: dict[str, Any] = {}

    def update(name: str, params: Any, grads: Any) -> Any:
        state = states.get(name) or optim.adamw_init(params)
        params, states[name] = optim.adamw(params, grads, state, lr=1e-2)
        return params

    ours = wanted = params
    for _ in range(3):
        ours = xf.stepped(cache_of(GPT, ours), ours, update)
        wanted, state = optim.adamw(wanted, cache_of(GPT, wanted).backward(), state, lr=1e-2)
    assert all(np.array_equal(a, flat(wanted)[name]) for name, a in flat(ours).items())


def test_the_memory() -> None:
    """Of a deep model: a fraction of the gradients, instead of gradients and new parameters."""

    def peak(how: str) -> float:
        model = xf.GPT(vocab_size=17, n_layers=12, d_model=64, n_heads=2, max_len=8)
        params = model.init(seed=0)
        cache = cache_of(model, params)
        size = tree.nbytes(params)
        tracemalloc.start()
        if how == "after":
            descent("", params, cache.backward())
        else:
            xf.stepped(cache, params, descent, donate=how == "donated")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most / size

    assert peak("after") > 1.9
    assert peak("kept") < 1.35
    assert peak("donated") < 0.4


def test_old_parameters_are_freed() -> None:
    """Without the garbage collector."""
    params = GPT.init(seed=0)
    cache = cache_of(GPT, params)
    old = [weakref.ref(a) for a in flat(params).values()]
    gc.collect()
    gc.disable()
    try:
        new = xf.stepped(cache, params, descent)
        del params, cache
        assert not any(a() is not None for a in old)
    finally:
        gc.enable()
    assert len(flat(new)) == len(old)


@only("numpy-readonly", "array-api-strict", "torch", "jax")
def test_on_every_library(library: Backend) -> None:
    """Arrays that cannot be overwritten stay as they are."""
    params = tree.map(library.asarray, GPT.init(seed=0))
    with xf.unfused():
        _, cache = GPT.loss(params, library.asarray(TOKENS), library.asarray(TARGETS))
    wanted = descent("", params, cache.backward())
    wanted = {name: library.to_numpy(a).copy() for name, a in flat(wanted).items()}
    new = xf.stepped(cache, params, descent, donate=True)
    assert all(np.array_equal(library.to_numpy(a), wanted[name]) for name, a in flat(new).items())


def test_bad_input() -> None:
    params = GPT.init(seed=0)
    reversible = xf.GPT(17, 2, 16, 2, 8, reversible=True)
    with pytest.raises(ValueError, match=r"stepped: '\*.blocks.0' matches none of \d+ nodes"):
        xf.stepped(cache_of(reversible, reversible.init(seed=0)), params, descent)
    with pytest.raises(ValueError, match=r"join: no parameters of these names: "):
        xf.stepped(cache_of(GPT, params), params, lambda name, p, g: {"w": 1})


def test_after_a_kernel_of_all_layers() -> None:
    pytest.importorskip("numba", reason="extra numba")
    model, tokens = xf.GPT(17, 2, 32, 4, 64), np.zeros((4, 64), int)
    params = model.init(seed=0)
    with xf.kernels("numba"):
        _, cache = model.loss(params, tokens, tokens)
    with pytest.raises(ValueError, match=r"stepped: .* a kernel of blocks ran; .*xf.unfused\(\)"):
        xf.stepped(cache, params, descent)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda p: None, ValueError, r"\S+ is missing"),
        (lambda p: p._replace(attn=None), ValueError, r"attn\.\S+ is missing"),
        (lambda p: tree.map(lambda a: 0.0, p), TypeError, r"\S+ must be an array, got float"),
        (lambda p: tree.map(np.float64, p), TypeError, r"\S+ must be float32, got float64"),
        (lambda p: tree.map(lambda a: a[:1, ...], p), ValueError, r"\S+ must have shape"),
    ],
    ids=["none", "one missing", "numbers", "dtype", "shape"],
)
def test_wrong_results_of_the_update(result: Any, error: type[Exception], message: str) -> None:
    params = GPT.init(seed=0)
    for donate in (False, True):
        with pytest.raises(error, match=rf"stepped: stack\.blocks\.2: the update of {message}"):
            xf.stepped(cache_of(GPT, params), params, lambda name, p, g: result(p), donate=donate)
