"""What happens between a model's logits and the next token.

A filter is a function `filter(logits, ids) -> logits`: logits (B, V) of the next token of each
text, ids those of each text so far, on the host. Filters change nothing that they are given, run
on the arrays of any library, and are put together by `compose`:

    sampler = compose(repetition_penalty(1.1), temperature(0.8), top_k(40), top_p(0.95))

That is the order in which transformers applies them. Each is the LogitsProcessor of its name there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from xformer import ops
from xformer.checks import as_indices, number, require_sizes
from xformer.dispatch import overridable
from xformer.typing import Array

Ids = Sequence[Sequence[int]]  # of each text
Filter = Callable[[Array, Ids], Array]

COLDEST = 1e-6  # below it, logits over a temperature would overflow


def require_filter(op: str, sampler: Any) -> None:
    """TypeError unless a sampler is a function, or None."""
    if sampler is not None and not callable(sampler):
        raise TypeError(f"{op}: sampler must be a function of logits and ids, got {sampler!r:.60}")


def compose(*filters: Filter) -> Filter:
    """One filter that applies these, the first one first; without any, one that does nothing."""
    for one in filters:
        if not callable(one):
            raise TypeError(f"compose: a filter must be a function, got {one!r:.60}")

    def apply(logits: Array, ids: Ids) -> Array:
        for one in filters:
            logits = one(logits, ids)
        return logits

    return apply


def temperature(t: float) -> Filter:
    """logits / t: below 1 the likely become likelier. 0 leaves the likeliest alone, the first one.

    ValueError unless t is a number of at least 0.
    """
    t = number("temperature", "t", t, low=0)

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        if t >= COLDEST:
            return logits / t
        places = xp.arange(logits.shape[-1], device=device(logits))
        best = xp.argmax(logits, axis=-1, keepdims=True)
        return xp.where(places == best, logits, -xp.inf)

    return apply


def top_k(k: int) -> Filter:
    """Only the k likeliest, and those as likely as the last of them. ValueError for k < 1."""
    (k,) = require_sizes("top_k", 1, k=k)

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        if k >= logits.shape[-1]:
            return logits
        least = xp.sort(logits, axis=-1)[..., -k, None]
        return xp.where(logits < least, -xp.inf, logits)

    return apply


def top_p(p: float) -> Filter:
    """Only the likeliest that together have probability p, at least one (arXiv:1904.09751).

    Gone are, from the unlikeliest on, those that together have at most 1 - p; of several that are
    equally likely the first ones go first. ValueError unless p lies in [0, 1].
    """
    rest = 1 - number("top_p", "p", p, low=0, high=1)

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        ascending = xp.sort(logits, axis=-1)
        total = xp.cumulative_sum(ops.softmax(ascending)[0], axis=-1)
        last = xp.arange(logits.shape[-1], device=device(logits)) == logits.shape[-1] - 1
        gone = (total <= rest) & ~last
        least = xp.min(xp.where(gone, xp.inf, ascending), axis=-1, keepdims=True)  # that is kept
        n_ties = xp.sum(_ones(gone & (ascending == least)), axis=-1, keepdims=True)
        ties = logits == least
        gone_ties = ties & (xp.cumulative_sum(_ones(ties), axis=-1) <= n_ties)
        return xp.where((logits < least) | gone_ties, -xp.inf, logits)

    return apply


def min_p(p: float) -> Filter:
    """Only those at least p times as likely as the likeliest (arXiv:2407.01082).

    ValueError unless p lies in [0, 1].
    """
    p = number("min_p", "p", p, low=0, high=1)

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        shares = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
        return xp.where(shares < p, -xp.inf, logits)

    return apply


def repetition_penalty(penalty: float) -> Filter:
    """Positive logits of tokens that the text has are divided by it, negative multiplied.

    From arXiv:1909.05858. ValueError unless penalty is positive and finite.
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


@overridable(backward=False)
def greedy(logits: Array) -> Array:
    """The token of the largest logit of each row of logits (B, V), -1 where that is not finite.

    (B,), one array, so that a device is waited for once.
    """
    xp = array_namespace(logits)
    return xp.where(xp.isfinite(xp.max(logits, axis=-1)), xp.argmax(logits, axis=-1), -1)


def draw(logits: np.ndarray, uniform: Sequence[float]) -> list[int]:
    """A token for each row of logits (B, V), drawn from its softmax by a number in [0, 1).

    On the host in float64, so that equal numbers draw equal tokens whichever library the logits
    come from. ValueError where the largest of a row is not finite.
    """
    return pick(probabilities(logits), uniform)


def pick(probs: np.ndarray, uniform: Sequence[float]) -> list[int]:
    """A token for each row of probs (B, V), by the inverse of its cumulative distribution.

    Rows need not add up to 1.
    """
    # `Generator.choice` would draw differently between NumPy releases.
    pairs = zip(np.cumsum(probs, axis=-1), uniform, strict=True)
    return [int(np.searchsorted(total, u * total[-1], side="right")) for total, u in pairs]


def probabilities(logits: np.ndarray) -> np.ndarray:
    """softmax(logits) on the host in float64. ValueError as `draw`."""
    scores = np.asarray(logits, dtype=np.float64)
    top = scores.max(axis=-1, keepdims=True)
    require_finite("draw", top)
    e: np.ndarray = np.exp(scores - top)
    return e / e.sum(axis=-1, keepdims=True)


def require_finite(op: str, top: np.ndarray) -> None:
    """ValueError unless the largest logits of all rows are numbers."""
    if not np.isfinite(top).all():
        raise ValueError(
            f"{op}: the largest logit of each row must be finite, got {_first(top)}: the model "
            "gives no probabilities, or a filter has left no token"
        )


def _ones(mask: Array) -> Array:
    return as_indices(array_namespace(mask).astype(mask, array_namespace(mask).uint8))


def _first(top: np.ndarray) -> Any:
    return top[~np.isfinite(top)][0]
