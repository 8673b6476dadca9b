"""Filters that forbid or force tokens, like the LogitsProcessors of transformers.

Like the filters of `samplers`, they are functions of logits (B, V) and the ids of each text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import require_sizes
from xformer.generation.samplers import Filter, Ids, compose, temperature
from xformer.generation.settings import Settings

Row = Sequence[int]


def constraints(
    settings: Settings, ends: Collection[int], n_prompt: int, max_new_tokens: int
) -> Filter | None:
    """A filter that forbids and forces tokens as the model's files ask; None if they do neither.

    settings: what the files say (`settings_of`).
    ends: the ids that end a text; min_length and min_new_tokens forbid them at first.
    n_prompt: tokens of the prompt; of an encoder-decoder, of the start of the target.
    max_new_tokens: the most tokens that follow the prompt.
    """
    s, begin = settings, n_prompt
    if n_prompt == 1 and s.forced_bos_token_id is not None:
        begin += 1  # begin_suppress_tokens apply after the forced token
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


def constrained(constraint: Filter | None, sampler: Filter | None) -> Filter | None:
    """`constraint` followed by `sampler`; without a sampler, by greedy decoding."""
    if constraint is None:
        return sampler
    return compose(constraint, temperature(0) if sampler is None else sampler)


def suppress(tokens: Collection[int], *, above: int = -1, below: int | None = None) -> Filter:
    """A filter that forbids `tokens` after texts longer than `above` and shorter than `below`."""

    def banned(row: Row) -> Iterable[int]:
        return tokens if above < len(row) and (below is None or len(row) < below) else ()

    return _without(banned)


def bad_words(words: Sequence[Sequence[int]]) -> Filter:
    """A filter that forbids these sequences of tokens. ValueError for an empty sequence."""
    if not all(words):
        raise ValueError("bad_words: each must have at least one token, got none")
    pairs = [(tuple(word[:-1]), word[-1]) for word in words]

    def banned(row: Row) -> Iterable[int]:
        return [last for first, last in pairs if not first or tuple(row[-len(first) :]) == first]

    return _without(banned)


def no_repeat_ngram(n: int) -> Filter:
    """A filter that forbids any n tokens in a row that the text has already. ValueError: n < 1."""
    require_sizes("no_repeat_ngram", 1, n=n)

    def banned(row: Row) -> Iterable[int]:
        tail = tuple(row[len(row) - n + 1 :])
        starts = range(len(row) - n + 1)
        return [row[i + n - 1] for i in starts if tuple(row[i : i + n - 1]) == tail]

    return _without(banned)


def force(tokens: Collection[int], length: int) -> Filter:
    """A filter that leaves only `tokens` after texts of `length` tokens, with logit 0."""

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        forced = [tokens if len(row) == length else () for row in ids]
        if not any(forced):
            return logits
        allowed = xp.asarray(_mask(forced, logits.shape[-1]), device=device(logits))
        some = xp.any(allowed, axis=-1, keepdims=True)
        return xp.where(some, xp.where(allowed, xp.zeros_like(logits), -xp.inf), logits)

    return apply


def _without(banned: Callable[[Row], Iterable[int]]) -> Filter:
    """A filter that sets the logits of `banned(ids of a text)` to -inf."""

    def apply(logits: Array, ids: Ids) -> Array:
        xp = array_namespace(logits)
        mask = _mask([banned(row) for row in ids], logits.shape[-1])
        if not mask.any():
            return logits
        return xp.where(xp.asarray(mask, device=device(logits)), -xp.inf, logits)

    return apply


def _mask(rows: Sequence[Iterable[int]], size: int) -> np.ndarray:
    """(B, size): True for the tokens in the row of each text."""
    mask = np.zeros((len(rows), size), np.bool_)
    for row, tokens in zip(mask, rows, strict=True):
        row[list(tokens)] = True
    return mask
