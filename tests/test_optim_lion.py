"""Lion: the numbers of optax, and steps of one size."""

from __future__ import annotations

import numpy as np
import pytest

from xformer import optim

# optax 0.2.8 in float64: 30 steps of optax.lion(0.02, b1=0.9, b2=0.99, weight_decay=0.1) from
# these numbers, with the gradient p^3 - 1.
START = np.linspace(-2.0, 2.0, 6).reshape(2, 3)
OPTAX = [
    [-1.300495447490606, -0.547129084324566, 0.20623727884147475],
    [0.9596036420075155, 0.979762818691328, 1.300495447490606],
]


def test_equals_optax() -> None:
    p, state = START, optim.lion_init(START)
    for _ in range(30):
        p, state = optim.lion(p, p**3 - 1, state, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)
    assert p == pytest.approx(np.array(OPTAX), rel=1e-12)


def test_every_step_is_of_one_size() -> None:
    rng = np.random.default_rng(1)
    p, state = START, optim.lion_init(START)
    for _ in range(5):
        new, state = optim.lion(p, rng.normal(size=p.shape), state, lr=0.125)
        assert np.allclose(np.abs(new - p), 0.125, rtol=1e-14)
        p = new
    still, _ = optim.lion(START, np.zeros_like(START), optim.lion_init(START), lr=0.125)
    assert np.array_equal(still, START)


def test_direction_and_memory_are_of_two_means() -> None:
    """beta1 decides the step, beta2 what is remembered."""
    m = optim.LionState(np.array([1.0, -1.0]))
    new, state = optim.lion(np.zeros(2), np.array([-2.0, 9.0]), m, lr=1.0, betas=(0.5, 0.75))
    assert new.tolist() == [1.0, -1.0]  # 0.5 * 1 - 0.5 * 2 < 0, 0.5 * -1 + 0.5 * 9 > 0
    assert state.m.tolist() == [0.25, 1.5]
