"""Activation checkpointing: the same gradients, bit for bit, from less that is kept."""

from __future__ import annotations

import dataclasses
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
from judges import douts, gradients
from libraries import only
from test_lora import CONFIGS, loss_of, made

from xformer import GPT, Transformer, backends, layers, ops, tree
from xformer.backends import Backend
from xformer.generation import generate
from xformer.layers.checkpoint import CheckpointCache
from xformer.ops.barrier import barrier
from xformer.proofs.catalogue import Case, cases

NUMPY = backends.get("numpy")
SUBJECTS = ("stack", "GPT", "Transformer", "LanguageModel", "EncoderDecoder")
# Reversible blocks exclude checkpointing: tests/test_reversible.py.
CASES = [c for c in cases() if c.subject in SUBJECTS and ": reversible" not in c.name]
SIZES: dict[str, Any] = {"vocab_size": 32, "d_model": 32, "n_heads": 4, "max_len": 64}


def checkpointing(fn: partial[Any], on: bool) -> partial[Any]:
    """The function of a case with checkpointing or without."""

    def set_in(model: Any) -> Any:
        is_model = dataclasses.is_dataclass(model) and hasattr(model, "activation_checkpointing")
        return dataclasses.replace(model, activation_checkpointing=on) if is_model else model

    if fn.func is layers.stack:
        return partial(fn.func, *fn.args, **fn.keywords | {"activation_checkpointing": on})
    function = fn.func
    if hasattr(function, "__self__"):
        function = getattr(set_in(function.__self__), function.__name__)
    return partial(function, *(set_in(arg) for arg in fn.args), **fn.keywords)


def results(fn: partial[Any], args: Any, dtype: str = "float64") -> dict[str, Any]:
    y, cache = fn(*args)
    grads = gradients(args, cache.backward(*douts(NUMPY, y, dtype)))
    return tree.flatten({"y": y if not isinstance(y, tuple) else y[0], "grad": list(grads)})


def require_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same bits, of the same leaves."""
    assert got.keys() == wanted.keys()
    for name, a in got.items():
        assert np.array_equal(a, wanted[name], equal_nan=True), name
        assert a.dtype == wanted[name].dtype, name


# ---- The same gradients ----


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_the_same_bits(case: Case, dtype: str) -> None:
    """Of every stack and model with every option, dropout and experts' losses among them."""
    fn, args = case.build(NUMPY, dtype)
    off, on = (results(checkpointing(fn, flag), args, dtype) for flag in (False, True))
    require_equal(on, off)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_frozen_parameters_stay_frozen(case: Case) -> None:
    fn, args = case.build(NUMPY)
    count = iter(range(1_000_000))

    def some(arg: Any) -> Any:
        names = [name for name in tree.flatten(arg) if next(count) % 2]
        is_params = isinstance(arg, tuple) and not isinstance(arg, layers.SideInputs)
        return tree.freeze(arg, *names) if names and is_params else arg

    frozen = tuple(some(arg) for arg in args)
    off, on = (results(checkpointing(fn, flag), frozen) for flag in (False, True))
    require_equal(on, off)


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters(name: str) -> None:
    model, params = made(name)
    off, on = (
        tree.flatten(
            loss_of(name, dataclasses.replace(model, activation_checkpointing=flag), params)[
                1
            ].backward()
        )
        for flag in (False, True)
    )
    require_equal(on, off)
    assert on.keys() == tree.flatten(tree.trained(params)).keys()


def test_a_backward_may_be_run_again() -> None:
    model = GPT(n_layers=2, activation_checkpointing=True, dropout=0.2, **SIZES)
    params, tokens = model.init(seed=1), np.arange(20).reshape(2, 10)
    _, cache = model.loss(params, tokens, tokens, dropout_key=ops.RandomKey(3, step=2))
    require_equal(tree.flatten(cache.backward()), tree.flatten(cache.backward()))


def test_generation_goes_on_as_without() -> None:
    """A text that grows has no backward, and nothing to run again."""
    model = GPT(n_layers=2, **SIZES)
    params = model.init(seed=1)
    again = dataclasses.replace(model, activation_checkpointing=True)
    prompts = [[1, 2, 3], [4, 5]]
    plain, checked = (generate(m, params, prompts, max_new_tokens=8) for m in (model, again))
    assert [list(ids) for ids in plain] == [list(ids) for ids in checked]


def test_a_past_goes_before_it() -> None:
    case = next(c for c in CASES if c.name == "stack: other windows, rotary")
    fn, (x, params, side) = case.build(NUMPY)
    context = fn.keywords["context"]._replace(kv_cache=(layers.KVCache(),) * 2)
    options = fn.keywords | {"context": context}
    (y, cache), (wanted, _) = (
        layers.stack(x, params, side, **options, activation_checkpointing=flag)
        for flag in (True, False)
    )
    assert np.array_equal(y, wanted) and cache.layers.kv_cache[1].length == x.shape[1]


# ---- What is kept ----


def kept(n_layers: int, activation_checkpointing: bool, **options: Any) -> int:
    """Bytes that a loss keeps for its backward, parameters apart: (B, T) = (4, 64)."""
    model = GPT(
        n_layers=n_layers, activation_checkpointing=activation_checkpointing, **SIZES | options
    )
    params = model.init(seed=1)
    tokens = np.arange(256).reshape(4, 64) % 32
    key = ops.RandomKey(1) if options.get("dropout") else None
    _, cache = model.loss(params, tokens, tokens, dropout_key=key)
    return tree.nbytes((params, cache)) - tree.nbytes(params)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_layer_keeps_its_input_alone(dropout: float) -> None:
    own = 4 * 64 * 32 * 4  # B * T * D float32
    one, two, six = (kept(n, True, dropout=dropout) for n in (1, 2, 6))
    assert two - one == own and six - two == 4 * own
    plain = kept(6, False, dropout=dropout) - kept(5, False, dropout=dropout)
    assert plain > 15 * own


def test_a_decoder_keeps_its_input_alone() -> None:
    """The memory is one array for all layers, whoever projects it."""

    def kept_by(n: int, shared: bool) -> int:
        model = Transformer(
            src_vocab_size=11,
            tgt_vocab_size=13,
            d_model=16,
            n_heads=2,
            n_encoder_layers=1,
            n_decoder_layers=n,
            max_len=9,
            shared_memory=shared,
            activation_checkpointing=True,
        )
        params = model.init(seed=1)
        src, tgt = np.ones((3, 9), np.int64), np.ones((3, 8), np.int64)
        _, cache = model.loss(params, src, tgt[:, :-1], tgt[:, 1:])
        return tree.nbytes((params, cache)) - tree.nbytes(params)

    for shared in (False, True):
        assert kept_by(3, shared) - kept_by(2, shared) == 3 * 7 * 16 * 4


def test_experts_keep_what_their_losses_ask_for() -> None:
    case = next(c for c in CASES if c.name == "LanguageModel: experts, checkpointing")
    fn, args = case.build(NUMPY)
    _, cache = fn(*args)
    routers = [block.router for block in cache.tokens.model.hidden.stack.blocks]
    assert [r is None for r in routers] == [False, False, True]
    assert routers[0].router_logits.shape == (20, 3) and routers[0].ids.shape == (20, 2)


def test_the_peak_of_a_step_falls() -> None:
    peaks = {}
    tokens = np.arange(256).reshape(4, 64) % 32
    for flag in (False, True):
        model = GPT(n_layers=8, activation_checkpointing=flag, **SIZES)
        params = model.init(seed=1)
        tracemalloc.start()
        _, cache = model.loss(params, tokens, tokens)
        cache.backward()
        peaks[flag] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del cache
    assert peaks[True] < 0.4 * peaks[False]


# ---- `held`, and what compilers make of it ----


def test_held_changes_nothing(library: Backend) -> None:
    x, dy = library.asarray([-0.0, 1.5, float("nan")], "float32"), library.asarray([0.0], "float32")
    memory, key = layers.KeyValue(x, dy), ops.RandomKey(1, step=2)
    assert barrier(x, memory=memory, key=key, dy=dy) == (x, memory, key)


def jitted(model: Any, params: Any, tokens: Any, step: Any) -> Any:
    import jax

    def run(params: Any, tokens: Any, step: Any) -> Any:
        loss, cache = model.loss(params, tokens, tokens, dropout_key=ops.RandomKey(1, step=step))
        return loss, cache.backward()

    return jax.jit(run).lower(params, tokens, step).compile()


@only("jax")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_compiler_does_not_undo_it(library: Backend, dropout: float) -> None:
    """Less memory and more arithmetic than without, and the same numbers."""
    import jax.numpy as jnp

    tokens, step = jnp.arange(256).reshape(4, 64) % 32, jnp.asarray(3)
    found = {}
    for flag in (False, True):
        model = GPT(n_layers=6, activation_checkpointing=flag, dropout=dropout, **SIZES)
        params = tree.map(library.asarray, model.init(seed=1))
        compiled = jitted(model, params, tokens, step)
        memory = compiled.memory_analysis().temp_size_in_bytes
        found[flag] = memory, compiled.cost_analysis()["flops"], compiled(params, tokens, step)
    assert found[True][0] < 0.32 * found[False][0]  # 0.39 if dropout kept its bits
    assert found[True][1] > 1.2 * found[False][1]
    off, on = (tree.flatten(found[flag][2]) for flag in (False, True))
    for name, a in on.items():
        assert np.allclose(a, off[name], rtol=1e-4, atol=1e-6), name


@only("jax")
def test_held_under_jit(library: Backend) -> None:
    import jax
    import jax.numpy as jnp

    x = jnp.asarray([-0.0, 1.5, np.nan], jnp.float32)

    def run(x: Any, dy: Any, step: Any) -> Any:
        memory = layers.KeyValue(2 * x, None)
        x, memory, key = barrier(x, memory=memory, key=ops.RandomKey(1, step, 5), dy=dy)
        return x, memory, key.step

    for dy in (jnp.zeros((0, 3)), jnp.zeros(3), jnp.full((2, 3), jnp.nan)):
        got, memory, step = jax.jit(run)(x, dy, 7)
        assert np.asarray(got).tobytes() == np.asarray(x).tobytes()
        assert np.array_equal(memory.k, 2 * x, equal_nan=True) and memory.v is None
        assert int(step) == 7


def test_it_is_what_the_option_makes() -> None:
    """Else all of the above would compare a model with itself."""
    for flag, kind in ((True, True), (False, False)):
        model = GPT(n_layers=2, activation_checkpointing=flag, **SIZES)
        tokens = np.zeros((1, 4), np.int64)
        _, cache = model.loss(model.init(), tokens, tokens)
        blocks = cache.model.hidden.stack.blocks
        assert [isinstance(block, CheckpointCache) for block in blocks] == [kind] * 2
