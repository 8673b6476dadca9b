"""Sampling: the distribution it draws from, its window, its errors."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import xformer as xf
from xformer.generation import sample

GPT = xf.GPT(vocab_size=7, n_layers=1, d_model=8, n_heads=2, max_len=5)
PARAMS = xf.tree.map(lambda p: p * 20, GPT.init(seed=1))  # far from uniform
NUMPY = xf.backends.get("numpy")


def last_logits(prompt: list[int]) -> np.ndarray:
    return GPT.forward(PARAMS, np.asarray([prompt[-GPT.max_len :]]))[0][0, -1]


def test_temperature_zero_takes_the_likeliest() -> None:
    tokens = [3, 1]
    for token in sample(GPT, PARAMS, [3, 1], backend=NUMPY, max_new=12, temperature=0):
        assert token == int(np.argmax(last_logits(tokens)))  # also past max_len
        tokens.append(token)
    assert len(tokens) == 14


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3)])
def test_draws_follow_the_distribution(temperature: float, top_k: int | None) -> None:
    logits = last_logits([2, 4]) / temperature
    if top_k:
        logits = np.where(logits < np.sort(logits)[-top_k], -np.inf, logits)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    n = 2000
    options = {"backend": NUMPY, "max_new": 1, "temperature": temperature, "top_k": top_k}
    drawn = Counter(next(sample(GPT, PARAMS, [2, 4], seed=i, **options)) for i in range(n))
    shares = np.array([drawn[i] / n for i in range(7)])
    assert (shares[probs == 0] == 0).all()
    assert abs(shares - probs).max() < 4 * 0.5 / np.sqrt(n)  # four standard deviations at most


def test_a_seed_gives_the_same_tokens() -> None:
    runs = [list(sample(GPT, PARAMS, [0], backend=NUMPY, max_new=9, seed=5)) for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0]) == 9


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt must hold at least one token"),
        ([1], {"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ([1], {"temperature": float("nan")}, "temperature must be at least 0, got nan"),
        ([1], {"max_new": -1}, "max_new must be at least 0, got -1"),
        ([1], {"seed": -1}, "seed must be at least 0, got -1"),
        ([1], {"top_k": 0}, "top_k must be at least 1, got 0"),
        ([7], {}, r"ids must lie in \[0, 7\), got ids from 7 to 7"),
    ],
)
def test_bad_requests_are_refused(
    prompt: list[int], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        next(sample(GPT, PARAMS, prompt, backend=NUMPY, **{"max_new": 1} | options))
