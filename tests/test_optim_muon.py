"""Muon: the numbers of torch, in our order of rows and columns; what it does to singular values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from xformer import optim
from xformer.backends import Backend

SHAPES = [(5, 3), (3, 5), (4, 4), (2, 11)]  # (I, O)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"lr": 0.02}, {"lr": 0.02}),
    "no nesterov": ({"lr": 0.02, "nesterov": False}, {"lr": 0.02, "nesterov": False}),
    "options": (
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.3, "ns_steps": 3},
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.3, "ns_steps": 3},
    ),
    "as adamw": (
        {"lr": 0.01, "match_adamw": True},
        {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw"},
    ),
}


def matrices() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape) for shape in SHAPES]


def run(params: Any, steps: int = 20, **options: Any) -> Any:
    state = optim.muon_init(params)
    for _ in range(steps):
        params, state = optim.muon(params, [p**3 - 1 for p in params], state, **options)
    return params


@pytest.mark.parametrize("case", OPTIONS)
def test_equals_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There weights are (O, I), which s tells apart, and the iteration is in bfloat16."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon: it came with 2.9")
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # to compare in float64
    ours, theirs = OPTIONS[case]
    leaves = [torch.tensor(w.T.copy()).requires_grad_() for w in matrices()]
    optimiser = torch.optim.Muon(leaves, **theirs)
    for _ in range(20):
        for w in leaves:
            w.grad = w.detach() ** 3 - 1
        optimiser.step()
    for got, wanted in zip(run(matrices(), **ours), leaves, strict=True):
        assert np.allclose(got, wanted.detach().numpy().T, rtol=1e-10, atol=1e-12)


def test_a_wide_layer_steps_further() -> None:
    """By max(1, O / I)^1/2: the same change of what comes out, whatever comes in."""
    for rows, columns in SHAPES:
        g = np.random.default_rng(2).normal(size=(rows, columns))
        options: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
        new, _ = optim.muon(g, g, optim.muon_init(g), **options)
        wanted = math.sqrt(max(1.0, columns / rows)) * optim.newton_schulz(g)
        assert np.allclose(g - new, wanted, rtol=1e-12)
        new, _ = optim.muon(g, g, optim.muon_init(g), match_adamw=True, **options)
        wanted = 0.2 * math.sqrt(max(rows, columns)) * optim.newton_schulz(g)
        assert np.allclose(g - new, wanted, rtol=1e-12)


@pytest.mark.parametrize("shape", [(8, 8), (8, 30), (30, 8), (3, 5, 4)])
def test_newton_schulz_makes_singular_values_about_one(
    library: Backend, shape: tuple[int, ...]
) -> None:
    x = np.random.default_rng(3).normal(size=shape)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = np.linspace(1.0, 0.02, s.shape[-1]) * np.ones_like(s)  # a condition of 50
    for scale in (1e-3, 1e3):
        given = library.asarray(scale * (u * s[..., None, :]) @ v, "float64")
        got = library.to_numpy(optim.newton_schulz(given))
        values = np.linalg.svd(got, compute_uv=False)
        assert values.min() > 0.6 and values.max() < 1.25
        # The same singular vectors: what is left of U^T y V is diagonal.
        inner = np.swapaxes(u, -1, -2) @ got @ np.swapaxes(v, -1, -2)
        diagonal = np.eye(inner.shape[-1]) * inner
        assert np.abs(inner - diagonal).max() < 1e-10


def test_no_gradient_is_no_step() -> None:
    w = np.ones((3, 2))
    new, state = optim.muon(w, 0 * w, optim.muon_init(w), lr=1.0, weight_decay=0.0)
    assert np.array_equal(new, w) and not state.momentum.any()


def test_a_stack_is_several_matrices() -> None:
    w = np.random.default_rng(4).normal(size=(2, 3, 4))
    (together,) = run([w], lr=0.1)
    apart = run([w[0], w[1]], lr=0.1)
    assert np.allclose(together, np.stack(apart), rtol=1e-12)


def test_only_matrices() -> None:
    for shape in ((3,), (), (0, 3)):
        params = {"w": np.ones((2, 2)), "b": np.ones(shape)}
        message = rf"^muon: b must be \(\.\.\., I, O\), got shape \({', '.join(map(str, shape))}"
        with pytest.raises(ValueError, match=message):
            optim.muon_init(params)
        state = optim.MuonState(params)
        with pytest.raises(ValueError, match=message):
            optim.muon(params, params, state, lr=0.1)
