"""Adafactor: the numbers of transformers, of torch where it means the same, and the paper's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from test_optim import distance, gradient, host, start

from xformer import backends, optim, tree

STEPS = 50
NUMPY = backends.get()
# Ours -> transformers'.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"lr": 0.02}, {"lr": 0.02}),
    "relative": ({"lr": 0.02, "relative": True}, {"lr": 0.02, "scale_parameter": True}),
    "decay": ({"lr": 0.02, "weight_decay": 0.3}, {"lr": 0.02, "weight_decay": 0.3}),
    "all": (
        {
            "lr": 0.1,
            "decay": 0.6,
            "clip": 0.5,
            "eps": (1e-4, 0.3),
            "relative": True,
            "weight_decay": 0.1,
        },
        {
            "lr": 0.1,
            "decay_rate": -0.6,
            "clip_threshold": 0.5,
            "eps": (1e-4, 0.3),
            "scale_parameter": True,
            "weight_decay": 0.1,
        },
    ),
}


def run(steps: int = STEPS, **options: Any) -> dict[str, np.ndarray]:
    params = start(NUMPY, "float64")
    params = params._replace(rest=[params.rest, NUMPY.generator(2, "float64").normal((2, 3, 4))])
    state = optim.adafactor_init(params)
    for t in range(1, steps + 1):
        lr = options["lr"](t) if callable(options["lr"]) else options["lr"]
        params, state = optim.adafactor(params, gradient(params), state, **{**options, "lr": lr})
    return host(NUMPY, params)


def run_torch(kind: Any, steps: int = STEPS, **options: Any) -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    leaves = {name: torch.tensor(p).requires_grad_() for name, p in run(0, lr=0).items()}
    optimiser = kind(list(leaves.values()), **options)
    for _ in range(steps):
        for p in leaves.values():
            p.grad = p.detach() ** 3 - 1
        optimiser.step()
    return {name: p.detach().numpy() for name, p in leaves.items()}


@pytest.mark.parametrize("case", OPTIONS)
def test_equals_transformers(case: str) -> None:
    optimization = pytest.importorskip(
        "transformers.optimization", reason="transformers is not installed"
    )
    ours, theirs = OPTIONS[case]
    theirs = {"relative_step": False, "scale_parameter": False, **theirs}
    # Near the minimum a gradient is a difference of equals, and its size is divided out.
    assert distance(run(**ours), run_torch(optimization.Adafactor, **theirs)) < 1e-11


def test_the_step_of_the_paper_is_a_schedule() -> None:
    optimization = pytest.importorskip(
        "transformers.optimization", reason="transformers is not installed"
    )
    theirs = run_torch(optimization.Adafactor, relative_step=True)
    ours = run(lr=lambda t: min(0.01, 1 / math.sqrt(t)), relative=True)
    assert distance(ours, theirs) < 1e-12


def test_equals_torch_where_it_means_the_same() -> None:
    """That is relative, its lr at most t^-1/2, its eps elsewhere: too small to matter here."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    theirs = run_torch(torch.optim.Adafactor, lr=0.05, eps=(1e-15, 1e-3))
    assert distance(run(lr=0.05, relative=True), theirs) < 1e-10


def test_second_moments_are_exact_for_gradients_of_rank_one() -> None:
    """Then the first step is the sign of the gradient, as Adam's."""
    g = np.outer([1.0, -2.0, 3.0], [0.5, 4.0])
    new, state = optim.adafactor(g, g, optim.adafactor_init(g), lr=0.25)
    assert np.allclose(g - new, 0.25 * np.sign(g), rtol=1e-14)
    assert np.allclose(state.rows, (g**2).mean(1)) and np.allclose(state.columns, (g**2).mean(0))


def test_updates_are_clipped_to_their_size() -> None:
    """A gradient 100 times those before moves by no more than clip * lr."""
    g = np.random.default_rng(1).normal(size=(4, 5))
    p, state = np.zeros((4, 5)), optim.adafactor_init(g)
    for _ in range(50):
        _, state = optim.adafactor(p, g, state, lr=1.0)
    for clip in (1.0, 0.25):
        new, _ = optim.adafactor(p, 100 * g, state, lr=0.5, clip=clip)
        assert math.sqrt((new**2).mean()) == pytest.approx(0.5 * clip, rel=1e-12)
    free, _ = optim.adafactor(p, 100 * g, state, lr=0.5, clip=1e9)
    assert math.sqrt((free**2).mean()) > 2


def test_stacks_are_matrices_each() -> None:
    g = np.random.default_rng(1).normal(size=(2, 3, 4))
    together, _ = optim.adafactor(g, g, optim.adafactor_init(g), lr=0.1, clip=1e9)
    for i in range(2):
        alone, _ = optim.adafactor(g[i], g[i], optim.adafactor_init(g[i]), lr=0.1, clip=1e9)
        assert np.allclose(together[i], alone, rtol=1e-13)
    assert tree.nbytes(optim.adafactor_init(g)) == 8 * 2 * (3 + 4)
