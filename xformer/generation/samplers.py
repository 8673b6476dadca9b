"""Filters of logits, and the choice of the next token.

A filter is a function `filter(logits, ids) -> logits`. logits: (B, V), of the next token of each
text. ids: the token ids of each text so far, on the host. A filter does not change its arguments,
and works on the arrays of any library. `compose` joins filters:

    sampler = compose(repetition_penalty(1.1), temperature(0.8), top_k(40), top_p(0.95))

transformers applies them in this order. Each computes what the LogitsProcessor of the same name in
transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import device

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import as_indices, number, require_sizes

Ids = Sequence[Sequence[int]]  # of each text
Filter = Callable[[Array, Ids], Array]

COLDEST = 1e-6  # below this temperature, logits / temperature would overflow


def require_filter(op: str, sampler: Any) -> None:
    """TypeError unless `sampler` is a function or None."""
    if sampler is not None and not callable(sampler):
        raise TypeError(f"{op}: sampler must be a function of logits and ids, got {sampler!r:.60}")


def compose(*filters: Filter) -> Filter:
    """A filter that applies `filters` in this order. TypeError if one is not a function."""
    for one in filters:
        if not callable(one):
            raise TypeError(f"compose: a filter must be a function, got {one!r:.60}")

    def apply(logits: Array, ids: Ids) -> Array:
        for one in filters:
            logits = one(logits, ids)
        return logits

    return apply


def temperature(t: float) -> Filter:
    """A filter that returns logits / t. For t = 0 only the first of the largest logits is left.

    ValueError unless t is a number of at least 0.
    """
    t = number("temperature", "t", t, low=0)

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        if t >= COLDEST:
            return logits / t
        tokens = xp.arange(logits.shape[-1], device=device(logits))
        best = xp.argmax(logits, axis=-1, keepdims=True)
        return xp.where(tokens == best, logits, -xp.inf)

    return apply


def top_k(k: int) -> Filter:
    """A filter that keeps the k most likely tokens, and ties with the last. ValueError: k < 1."""
    (k,) = require_sizes("top_k", 1, k=k)

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        if k >= logits.shape[-1]:
            return logits
        least = xp.sort(logits, axis=-1)[..., -k, None]
        return xp.where(logits < least, -xp.inf, logits)

    return apply


def top_p(p: float) -> Filter:
    """A filter that keeps the most likely tokens of total probability p (arXiv:1904.09751).

    It removes the least likely tokens while their total probability is at most 1 - p. Among equally
    likely tokens, lower ids are removed first. At least one token is kept. ValueError unless p is
    in [0, 1].
    """
    excluded = 1 - number("top_p", "p", p, low=0, high=1)

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        ascending = xp.sort(logits, axis=-1)
        total = xp.cumulative_sum(ops.softmax(ascending)[0], axis=-1)
        last = xp.arange(logits.shape[-1], device=device(logits)) == logits.shape[-1] - 1
        removed = (total <= excluded) & ~last
        least = xp.min(xp.where(removed, xp.inf, ascending), axis=-1, keepdims=True)  # kept logit
        n_ties = xp.sum(_ones(removed & (ascending == least)), axis=-1, keepdims=True)
        ties = logits == least
        removed_ties = ties & (xp.cumulative_sum(_ones(ties), axis=-1) <= n_ties)
        return xp.where((logits < least) | removed_ties, -xp.inf, logits)

    return apply


def min_p(p: float) -> Filter:
    """A filter that keeps tokens at least p times as likely as the most likely (arXiv:2407.01082).

    ValueError unless p is in [0, 1].
    """
    p = number("min_p", "p", p, low=0, high=1)

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        ratios = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
        return xp.where(ratios < p, -xp.inf, logits)

    return apply


def repetition_penalty(penalty: float) -> Filter:
    """A filter that makes tokens of the text less likely, for penalty > 1 (arXiv:1909.05858).

    It divides the positive logits of tokens that the text has already by `penalty`, and multiplies
    the negative ones. ValueError unless penalty is positive and finite.
    """
    penalty = number("repetition_penalty", "penalty", penalty, low=0)
    if not 0 < penalty < float("inf"):
        raise ValueError(f"repetition_penalty: penalty must be positive and finite, got {penalty}")

    def apply(logits: Array, ids: Ids) -> Array:
        xp, size = array_namespace(logits), logits.shape[-1]
        counts = [np.bincount(np.asarray(row, dtype=np.int64), minlength=size) for row in ids]
        seen = xp.asarray(np.stack(counts) > 0, device=device(logits))  # (B, V)
        punished = xp.where(logits < 0, logits * penalty, logits / penalty)
        return xp.where(seen, punished, logits)

    return apply


def draw(logits: np.ndarray, uniform: Sequence[float]) -> list[int]:
    """A token for each row of `logits` (B, V), sampled from its softmax.

    uniform: a random number in [0, 1) for each row. Computed on the host in float64, so that equal
    numbers give equal tokens for logits of every library. ValueError if the largest logit of a row
    is not finite.
    """
    return pick(probabilities(logits), uniform)


def pick(probs: np.ndarray, uniform: Sequence[float]) -> list[int]:
    """A token for each row of `probs` (B, V), by the inverse of its cumulative distribution.

    probs: not negative. A row need not sum to 1, but its sum must be positive.
    uniform: a random number in [0, 1) for each row
    """
    # `Generator.choice` may sample differently in other NumPy releases.
    pairs = zip(np.cumsum(probs, axis=-1), uniform, strict=True)
    return [int(np.searchsorted(total, u * total[-1], side="right")) for total, u in pairs]


def probabilities(logits: np.ndarray) -> np.ndarray:
    """softmax(logits) in float64. ValueError if the largest logit of a row is not finite."""
    scores = np.asarray(logits, dtype=np.float64)
    top = scores.max(axis=-1, keepdims=True)
    require_finite("draw", top)
    e: np.ndarray = np.exp(scores - top)
    return e / e.sum(axis=-1, keepdims=True)


def require_finite(op: str, top: np.ndarray) -> None:
    """ValueError unless `top`, the largest logit of each row, is finite."""
    if not np.isfinite(top).all():
        raise ValueError(
            f"{op}: the largest logit of each row must be finite, got {top[~np.isfinite(top)][0]}: "
            "the model's logits are not numbers, or a filter has removed all tokens"
        )


def _ones(mask: Array) -> Array:
    return as_indices(array_namespace(mask).astype(mask, array_namespace(mask).uint8))
