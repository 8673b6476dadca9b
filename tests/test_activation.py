"""What the newer activations, their table and gated units promise beyond their gradients."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from xformer.backends import Backend
from xformer.ops import clamped_swiglu, glu, quick_gelu, relu_squared, softcap
from xformer.ops.activation import ACTIVATIONS, require_activation

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
            "relu_squared, quick_gelu, got 'swish'",
        ),
        (
            lambda: require_activation("mlp", ["silu"]),
            ValueError,
            "mlp: activation must be one of relu, gelu, gelu_tanh, silu, tanh, sigmoid, "
            "relu_squared, quick_gelu, got ['silu']",
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
