"""What the newer activations, their table and gated units promise beyond their gradients."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from array_api_compat import array_namespace
from block_configs import block_config

import xformer as xf
from xformer import backends, pretrained, training, tree
from xformer.backends import Backend
from xformer.layers import EmbedConfig
from xformer.models import LanguageModel
from xformer.ops import activation, clamped_swiglu, glu, quick_gelu, relu_squared, softcap
from xformer.ops.activation import ACTIVATIONS, require_activation
from xformer.training import Batch

RNG = np.random.default_rng(11)
X, UP, DY = (RNG.normal(size=(5, 7)) * 2 for _ in range(3))

# By name in transformers.activations.ACT2FN.
THEIRS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "silu": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "relu_squared": "relu2",
    "quick_gelu": "quick_gelu",
}


def theirs(name: str) -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("transformers.activations").ACT2FN[THEIRS[name]]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_the_one_of_transformers(name: str) -> None:
    act = theirs(name)
    import torch

    x = torch.tensor(X, requires_grad=True)
    wanted = act(x)
    (dwanted,) = torch.autograd.grad(wanted, x, torch.tensor(DY))
    y, cache = ACTIVATIONS[name](X)
    for a, b in ((y, wanted), (cache.backward(DY), dwanted)):
        assert np.allclose(a, b.detach().numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(name: str) -> None:
    act = theirs(name)
    import torch

    leaves = [torch.tensor(a, requires_grad=True) for a in (X, UP)]
    wanted = act(leaves[0]) * leaves[1]
    dwanted = torch.autograd.grad(wanted, leaves, torch.tensor(DY))
    y, cache = glu(X, UP, activation=name)
    assert cache.gate is X and cache.up is UP  # and nothing else is kept
    for a, b in zip((y, *cache.backward(DY)), (wanted, *dwanted), strict=True):
        assert np.allclose(a, b.detach().numpy(), rtol=1e-12, atol=1e-15)


def test_gates_with_silu_unless_told() -> None:
    assert np.array_equal(glu(X, UP)[0], glu(X, UP, activation="silu")[0])


def test_clamped_swiglu_outside_its_limits(library: Backend) -> None:
    """The gate is clamped above, up on both sides; at a limit dy passes."""
    gate = library.asarray([-np.inf, -9.0, 2.0, 3.0, np.inf, 1.0, 1.0, 1.0])
    up = library.asarray([1.0, 1.0, 1.0, 1.0, 1.0, -2.0, np.inf, -np.inf])
    y, cache = clamped_swiglu(gate, up, limit=2.0)
    dgate, dup = map(library.to_numpy, cache.backward(library.asarray(np.ones(8))))

    def act(g: float) -> float:
        return g / (1 + float(np.exp(-1.702 * g)))

    wanted = [0, 2 * act(-9), *[2 * act(2)] * 3, -act(1), 3 * act(1), -act(1)]
    assert np.allclose(library.to_numpy(y), wanted, rtol=1e-13, atol=1e-15)
    assert dgate[[0, 3, 4]].tolist() == [0, 0, 0] and dgate[[1, 2, 5, 6, 7]].all()
    inside = [0, act(-9), *[act(2)] * 3, act(1)]
    assert np.allclose(dup, [*inside, 0, 0], rtol=1e-13, atol=1e-15)


def test_relu_squared_at_its_kink_and_ends(library: Backend) -> None:
    y, cache = relu_squared(library.asarray([-np.inf, -3.0, 0.0, 3.0, np.inf]))
    assert library.to_numpy(y).tolist() == [0, 0, 0, 9, np.inf]
    dx = cache.backward(library.asarray(np.full(5, 0.5)))
    assert library.to_numpy(dx).tolist() == [0, 0, 0, 3, np.inf]


def test_softcap_keeps_small_numbers_and_bounds_large_ones(library: Backend) -> None:
    x = library.asarray([-1e9, -1e-3, 0.0, 1e-3, 1e9])
    y = library.to_numpy(softcap(x, cap=50.0)[0])
    assert np.allclose(y, [-50, -1e-3, 0, 1e-3, 50], rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: softcap(X, cap=0.0),
            ValueError,
            "softcap: cap must be positive and finite, go...",
        ),
        (
            lambda: softcap(X, cap=-1),
            ValueError,
            "softcap: cap must be positive and finite, got...",
        ),
        (
            lambda: softcap(X, cap=np.inf),
            ValueError,
            "softcap: cap must be positive and finite,...",
        ),
        (
            lambda: softcap(X, cap=np.nan),
            ValueError,
            "softcap: cap must lie in [-inf, inf], got...",
        ),
        (lambda: softcap(X, cap=None), TypeError, "softcap: cap must be a number, got NoneType"),
        (lambda: softcap([1.0], cap=1.0), TypeError, "softcap: x must be an array, got list"),
        (
            lambda: clamped_swiglu(X, UP, limit=-7.0),
            ValueError,
            "clamped_swiglu: limit must be positive and finite, got -7.0",
        ),
        (
            lambda: quick_gelu(X > 0),
            TypeError,
            "quick_gelu: x must be float32 or float64, got b...",
        ),
        (lambda: relu_squared(None), TypeError, "relu_squared: x must be an array, got None"),
        (
            lambda: glu(X, UP[:, :3]),
            ValueError,
            "glu: up must be (..., F) with ... = (5,) (from gate), F = 7 (from gate), got shape...",
        ),
        (
            lambda: glu(X, UP, activation="swish"),
            ValueError,
            "glu: activation must be one of relu, gelu, gelu_tanh, silu, tanh, sigmoid, "
            "relu_squared, quick_gelu, got 'swish'; ops.activation.register adds one of your own",
        ),
        (
            lambda: require_activation("mlp", ["silu"]),
            ValueError,
            "mlp: activation must be one of relu, gelu, gelu_tanh, silu, tanh, sigmoid, "
            "relu_squared, quick_gelu, got ['silu']; ops.activation.register adds one of your own",
        ),
    ],
)
def test_bad_input(call: Any, error: Any, message: str) -> None:
    whole = re.escape(message.removesuffix("...")) + ("" if message.endswith("...") else "$")
    with pytest.raises(error, match=f"^{whole}"):
        call()


@pytest.mark.parametrize("op", [relu_squared, quick_gelu], ids=lambda op: op.__name__)
def test_bad_gradients(op: Any) -> None:
    _, cache = op(X)
    with pytest.raises(ValueError, match=rf"^{op.__name__}: dy must have shape \(5, 7\), got"):
        cache.backward(DY[1:])
    with pytest.raises(ValueError, match=r"^glu: dy must have shape \(5, 7\), got \(7,\)$"):
        glu(X, UP)[1].backward(DY[0])
    with pytest.raises(TypeError, match=r"^softcap: dy must be an array, got None$"):
        softcap(X, cap=2.0)[1].backward(None)


# ---- Of one's own ----


def mish(x: Any) -> Any:
    xp = array_namespace(x)
    return x * xp.tanh(xp.log1p(xp.exp(x)))


def dmish(x: Any) -> Any:
    xp = array_namespace(x)
    e = xp.exp(x)
    t = xp.tanh(xp.log1p(e))
    return t + x * (1 - t * t) * e / (1 + e)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The op of mish, which is forgotten after the test."""
    monkeypatch.setattr(activation, "_own", {})
    return activation.register("mish", mish, dmish)


def test_an_own_activation_is_an_op(own: Any) -> None:
    y, cache = own(X)
    assert np.array_equal(y, mish(X)) and xf.gradcheck(own, X).ok
    assert xf.gradcheck(lambda a, b: glu(a, b, activation="mish"), X, UP).ok
    pytest.importorskip("torch", reason="torch is not installed")
    import torch

    x = torch.tensor(X, requires_grad=True)
    wanted = torch.nn.functional.mish(x)
    (dwanted,) = torch.autograd.grad(wanted, x, torch.tensor(DY))
    np.testing.assert_allclose(y, wanted.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(cache.backward(DY), dwanted.numpy(), rtol=1e-11, atol=1e-14)
    with pytest.raises(ValueError, match="mish: dy must have shape"):
        cache.backward(DY[0])
    with xf.inference():
        assert type(own(X)[1]).__name__ == "NoCache"


TOKENS, TARGETS = RNG.integers(0, 11, (2, 3, 6))


def test_an_own_activation_trains_a_gpt(own: Any, library: Backend) -> None:
    """With the same gradients on every library, one example at a time too."""
    gpt = xf.GPT(11, 1, 8, 2, 6, activation="mish")

    def graded(backend: Backend) -> Any:
        params = gpt.init(0, backend, "float64")
        with xf.unfused():
            arrays = (backend.asarray(a) for a in (TOKENS, TARGETS))
            loss, cache = gpt.loss(params, *arrays)
        found = xf.per_example(cache).grads
        return [backend.to_numpy(a) for a in (loss, *tree.flatten(found).values())]

    for got, wanted in zip(graded(library), graded(backends.get("numpy")), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
def test_an_own_activation_in_compiled_steps(own: Any) -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    rows = [Batch((TOKENS, TARGETS), {}, TARGETS.size, TOKENS.size)]
    config = training.TrainConfig(steps=3, batch_size=3, lr=1e-2, warmup=1)
    losses = {}
    for gated in (False, True):
        block = block_config(8, 2, 12, activation="mish", gated=gated)
        model = LanguageModel(EmbedConfig(11, 8, 8, max_len=6), (block,))
        for name in ("numpy", "numba"):
            state = training.start(model.init(0), config)
            source = SimpleNamespace(batch=lambda i: rows[0])
            steps = training.train(
                training.loss_of(model), state, source, config, name, donate=True
            )
            losses[name] = [step.loss for step in steps]
        np.testing.assert_allclose(losses["numba"], losses["numpy"], rtol=1e-5)
        assert losses["numpy"][-1] < losses["numpy"][0]


def test_files_store_the_name_of_an_own_activation(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = xf.GPT(11, 1, 8, 2, 6, activation="mish")
    training.save(tmp_path / "gpt", gpt, gpt.init(0), "numpy")
    assert training.load(tmp_path / "gpt", "numpy")[0] == gpt
    monkeypatch.setattr(activation, "_own", {})  # as in another process
    wanted = r"activation must be one of .*, got 'mish'; ops\.activation\.register adds one of your"
    with pytest.raises(ValueError, match=wanted):
        training.load(tmp_path / "gpt", "numpy")


def test_a_file_of_transformers_cannot_store_an_own_activation(own: Any, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = pretrained.model(config | {"n_positions": 6, "architectures": ["GPT2LMHeadModel"]})
    block = replace(model.blocks[0], ffn=replace(model.blocks[0].ffn, activation="mish"))
    other = replace(model, blocks=(block,))
    with pytest.raises(ValueError, match=r"activation must be 'gelu_tanh', got 'mish'"):
        pretrained.save(other, other.init(0), tmp_path / "gpt2")
    assert not (tmp_path / "gpt2").exists()


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("relu", mish, dmish), ValueError, "the name 'relu' is in use"),
        (("mish", mish, dmish), ValueError, "the name 'mish' is in use"),
        (("clamped_swiglu", mish, dmish), ValueError, "the name 'clamped_swiglu' is in use"),
        ((mish, mish, dmish), TypeError, "name must be a string, got function"),
        (("new", X, dmish), TypeError, "formula must be a function, got ndarray"),
        (("new", mish, None), TypeError, "derivative must be a function, got NoneType"),
    ],
)
def test_what_cannot_be_registered(
    args: Any, error: type[Exception], message: str, own: Any
) -> None:
    with pytest.raises(error, match=f"register: {message}"):
        activation.register(*args)
    assert "new" not in ACTIVATIONS


def test_functions_of_another_form(own: Any) -> None:
    wide = activation.register("wide", lambda x: x.astype(np.float32), dmish)
    with pytest.raises(TypeError, match="wide: the formula's result must be float64, got float32"):
        wide(X)
    _, cache = activation.register("summed", mish, lambda x: x.sum(axis=1))(X)
    with pytest.raises(ValueError, match=r"summed: the derivative's result must have shape"):
        cache.backward(DY)
    with pytest.raises(ValueError, match=r"got .*; ops\.activation\.register adds one of your own"):
        xf.GPT(11, 1, 8, 2, 6, activation=mish)  # type: ignore[arg-type]
