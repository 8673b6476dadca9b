"""Sampling one token after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer.backends import Backend


def sample(
    model: Any,
    params: Any,
    prompt: Sequence[int],
    *,
    backend: Backend,
    max_new: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `max_new` token ids that continue the prompt.

    Each is drawn from softmax(logits / temperature), of the `top_k` most likely ids only where
    given; temperature 0 takes the most likely one. The model sees the last model.max_len tokens.
    Raises ValueError for an empty prompt, top_k < 1, and other numbers below 0.
    """
    if len(prompt) == 0:
        raise ValueError("sample: the prompt must hold at least one token")
    if not temperature >= 0:
        raise ValueError(f"sample: temperature must be at least 0, got {temperature}")
    if max_new < 0:
        raise ValueError(f"sample: max_new must be at least 0, got {max_new}")
    if seed < 0:
        raise ValueError(f"sample: seed must be at least 0, got {seed}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"sample: top_k must be at least 1, got {top_k}")
    return _sample(model, params, list(prompt), backend, max_new, temperature, top_k, seed)


def _sample(
    model: Any,
    params: Any,
    tokens: list[int],
    backend: Backend,
    max_new: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    for _ in range(max_new):
        seen = backend.asarray([tokens[-model.max_len :]], dtype="int64")
        logits, _ = model.forward(params, seen)
        tokens.append(_draw(backend.to_numpy(logits[0, -1, :]), temperature, top_k, rng))
        yield tokens[-1]


def _draw(
    logits: np.ndarray, temperature: float, top_k: int | None, rng: np.random.Generator
) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    scores = logits.astype(np.float64) / temperature
    if top_k is not None and top_k < len(scores):
        scores = np.where(scores < np.sort(scores)[-top_k], -np.inf, scores)
    probs = np.exp(scores - scores.max())
    # By the cumulative sum: `rng.choice` would draw differently between NumPy releases.
    total = np.cumsum(probs)
    return int(np.searchsorted(total, rng.random() * total[-1], side="right"))
