"""Filters that forbid tokens or force them, as the LogitsProcessors of transformers do.

As the filters of `samplers`, they are functions of logits (B, V) and the ids of each text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from array_api_compat import array_namespace, device

from xformer.checks import require_sizes
from xformer.generation.samplers import Filter, Ids, compose, temperature
from xformer.generation.settings import Settings
from xformer.typing import Array

Row = Sequence[int]


def constraints(
    settings: Settings, ends: Collection[int], n_prompt: int, max_new_tokens: int
) -> Filter | None:
    """What a model's files forbid and force; None where they do neither.

    ends: the ids that end a text; min_length and min_new_tokens put them off. n_prompt: tokens of
    the prompt, or of the start of a target. max_new_tokens: the most tokens that follow it.
    """
    s, begin = settings, n_prompt
    if n_prompt == 1 and s.forced_bos_token_id is not None:
        begin += 1  # the forced token comes before those that may not begin a text
    least = s.min_length or 0 if s.min_new_tokens is None else n_prompt + s.min_new_tokens
    chosen: list[Filter] = []
    if s.bad_words_ids:
        chosen.append(bad_words([w for w in s.bad_words_ids if len(w) > 1 or w[0] not in ends]))
    if ends and least > n_prompt:
        chosen.append(suppress(ends, below=least))
    if s.forced_bos_token_id is not None:
        chosen.append(force([s.forced_bos_token_id], 1))
    if s.forced_eos_token_id:
        chosen.append(force(s.forced_eos_token_id, n_prompt + max_new_tokens - 1))
    if s.suppress_tokens:
        chosen.append(suppress(s.suppress_tokens))
    if s.begin_suppress_tokens:
        chosen.append(suppress(s.begin_suppress_tokens, above=begin - 1, below=begin + 1))
    return compose(*chosen) if chosen else None


def constrained(own: Filter | None, sampler: Filter | None) -> Filter | None:
    """Constraints before a sampler of `stream`; without a sampler, the likeliest token is left."""
    if own is None:
        return sampler
    return compose(own, temperature(0) if sampler is None else sampler)


def suppress(tokens: Collection[int], *, above: int = -1, below: int | None = None) -> Filter:
    """These tokens do not come, in texts longer than `above` and shorter than `below` tokens."""

    def banned(row: Row) -> Iterable[int]:
        return tokens if above < len(row) and (below is None or len(row) < below) else ()

    return _without(banned)


def bad_words(words: Sequence[Sequence[int]]) -> Filter:
    """No text has these tokens one after another. ValueError for a word without tokens."""
    if not all(words):
        raise ValueError("bad_words: each must have at least one token, got none")
    kept = [(tuple(word[:-1]), word[-1]) for word in words]

    def banned(row: Row) -> Iterable[int]:
        return [last for first, last in kept if not first or tuple(row[-len(first) :]) == first]

    return _without(banned)


def no_repeat_ngram(n: int) -> Filter:
    """No n tokens come twice in the same order. ValueError for n < 1."""
    require_sizes("no_repeat_ngram", 1, n=n)

    def banned(row: Row) -> Iterable[int]:
        tail = tuple(row[len(row) - n + 1 :])
        starts = range(len(row) - n + 1)
        return [row[i + n - 1] for i in starts if tuple(row[i : i + n - 1]) == tail]

    return _without(banned)


def force(tokens: Collection[int], length: int) -> Filter:
    """One of these tokens comes after texts of `length` tokens, with logit 0."""

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        forced = [tokens if len(row) == length else () for row in ids]
        if not any(forced):
            return logits
        kept = xp.asarray(_mask(forced, logits.shape[-1]), device=device(logits))
        some = xp.any(kept, axis=-1, keepdims=True)
        return xp.where(some, xp.where(kept, xp.zeros_like(logits), -xp.inf), logits)

    return apply


def _without(banned: Callable[[Row], Iterable[int]]) -> Filter:
    """-inf for the tokens that a text may not have next."""

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        mask = _mask([banned(row) for row in ids], logits.shape[-1])
        if not mask.any():
            return logits
        return xp.where(xp.asarray(mask, device=device(logits)), -xp.inf, logits)

    return apply


def _mask(rows: Sequence[Iterable[int]], size: int) -> np.ndarray:
    """True for these tokens of each text: (B, V)."""
    mask = np.zeros((len(rows), size), np.bool_)
    for own, tokens in zip(mask, rows, strict=True):
        own[list(tokens)] = True
    return mask
