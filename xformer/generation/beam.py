"""Beam search: extend several continuations at a time, and keep the most likely ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.dispatch.checks import number, require_sizes
from xformer.generation.prefix import (
    PrefilledPrompt,
    backend_of_params,
    extended,
    fitting,
    prefill,
    require_writer,
    stop_ids,
)
from xformer.generation.samplers import Filter, Ids, require_finite

NEVER = -1e9  # the score of a beam that must not be chosen, as in transformers


class Beam(NamedTuple):
    """A continuation and its score: the sum of its log probabilities / length ** length_penalty."""

    ids: list[int]
    score: float


def beam_search(
    model: Any,
    params: Any,
    prompts: Ids | PrefilledPrompt,
    *,
    n_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    stop: Collection[int] | None = (),
    filters: Filter | None = None,
) -> list[list[Beam]]:
    """The `n_beams` best continuations of each prompt, the best one first.

    transformers' generate(num_beams=n_beams, do_sample=False) gives the same tokens.

    model: a causal `LanguageModel` or an `EncoderDecoder`, with a head over its vocabulary.
    prompts: a list of token ids each; for an encoder-decoder the sources; or what `prefill` read.
    n_beams: unfinished sequences that are extended at each step, the most likely ones.
    max_new_tokens: the most ids of a continuation, at least 1.
    length_penalty: above 0, longer continuations score higher.
    early_stopping: when a prompt with n_beams finished continuations is done. True: at once. False:
        when the best unfinished one scores lower than all of them. "never": when it would score
        lower even at its greatest length.
    stop: ids that end a continuation, which includes the id.
    filters: changes the log probabilities of the next token, as a sampler of `stream` changes
        logits.

    ValueError if prompt and max_new_tokens do not fit the context, and for bad prompts (`prefill`),
    bad numbers, and logits that are not finite.
    """
    require_writer("beam_search", model)
    n_beams, max_new_tokens = require_sizes(
        "beam_search", 1, n_beams=n_beams, max_new_tokens=max_new_tokens
    )
    penalty = _usable_penalty(length_penalty, max_new_tokens)
    if early_stopping not in (True, False, "never"):
        raise ValueError(
            f'beam_search: early_stopping must be True, False or "never", got {early_stopping!r}'
        )
    stops = stop_ids("beam_search", stop)
    start = fitting("beam_search", model, prompts, max_new_tokens)
    rule = Rule(n_beams, max_new_tokens, penalty, early_stopping, stops)
    backend = backend_of_params(params)
    with backend.active():
        text = start if isinstance(start, PrefilledPrompt) else prefill(model, params, start)
        searches = [Search(rule) for _ in text.ids]
        text = text.rows([i for i in range(len(searches)) for _ in range(n_beams)])
        for n in range(max_new_tokens):
            if n:
                rows = [i * n_beams + row for i, s in enumerate(searches) for row in s.rows]
                if rows != list(range(len(rows))):
                    text = text.rows(rows)
                new = [i for s in searches for i in s.new]
                text = extended(model, params, text, new, backend)
            scored = ops.log_softmax(text.logits)[0]
            log_probs = backend.to_numpy(scored if filters is None else filters(scored, text.ids))
            require_finite("beam_search", log_probs.max(axis=-1))
            for search, scores in zip(searches, np.split(log_probs, len(searches)), strict=True):
                search.step(scores.astype(np.float64))
            if all(search.done for search in searches):
                break
    return [search.ended for search in searches]


def _usable_penalty(length_penalty: float, max_new_tokens: int) -> float:
    """`length_penalty` as a float. ValueError if length ** length_penalty overflows or is 0."""
    penalty = number("beam_search", "length_penalty", length_penalty)
    with suppress(OverflowError):
        if 0 < float(max_new_tokens) ** penalty < math.inf:
            return penalty
    raise ValueError(
        f"beam_search: length_penalty must leave {max_new_tokens} ** length_penalty positive and "
        f"finite, got {length_penalty}"
    )


class Rule(NamedTuple):
    """The settings that all searches of a batch share."""

    n_beams: int
    max_new_tokens: int
    length_penalty: float
    early_stopping: bool | str
    stops: frozenset[int]


class Search:
    """The beams of one prompt: the unfinished ones, `open`, and the best finished ones, `ended`.

    Beam j of `open` extends beam `rows[j]` of the previous step by the token `new[j]`.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        # All beams start as the same text, so only the first may be extended.
        self.open = [Beam([], 0.0)] + [Beam([], NEVER)] * (rule.n_beams - 1)
        self.ended: list[Beam] = []
        self.rows: list[int] = []
        self.new: list[int] = []
        self.done = False

    def step(self, log_probs: np.ndarray) -> None:
        """Extend the beams by one token. log_probs: (n_beams, V), of the token after each."""
        rule = self.rule
        scores = log_probs + np.asarray([[beam.score] for beam in self.open])
        # Enough candidates for n_beams unfinished ones, even if all stop tokens are among them.
        n_best = max(2, 1 + len(rule.stops)) * rule.n_beams
        best = [divmod(int(i), scores.shape[1]) for i in _largest(scores.ravel(), n_best)]
        length = len(self.open[0].ids) + 1
        ends = [length == rule.max_new_tokens or i in rule.stops for _, i in best]
        grown = [Beam([*self.open[row].ids, i], float(scores[row, i])) for row, i in best]
        if not self.done:
            late = [b for b, end in zip(grown[: rule.n_beams], ends, strict=False) if end]
            self._keep(late, length)
        going = [j for j, end in enumerate(ends) if not end][: rule.n_beams]
        self.open = [grown[j] for j in going]
        self.rows, self.new = [best[j][0] for j in going], [best[j][1] for j in going]
        self.done = self.done or not self.open or self._is_done(length)

    def _keep(self, ended: Sequence[Beam], length: int) -> None:
        """Add beams that ended at `length` tokens to `ended`, and keep the best n_beams."""
        scored = [Beam(b.ids, b.score / length**self.rule.length_penalty) for b in ended]
        order = sorted(self.ended + scored, key=lambda beam: -beam.score)
        self.ended = order[: self.rule.n_beams]

    def _is_done(self, length: int) -> bool:
        rule = self.rule
        if len(self.ended) < rule.n_beams:
            return False
        if rule.early_stopping is True:
            return True
        if rule.early_stopping == "never" and rule.length_penalty > 0:
            length = rule.max_new_tokens
        return self.open[0].score / length**rule.length_penalty <= self.ended[-1].score


def _largest(values: np.ndarray, n: int) -> np.ndarray:
    """The indices of the n largest values, the largest first; among equal ones the lower index."""
    if n < len(values):
        least = np.partition(values, -n)[-n]
        candidates = np.flatnonzero(values >= least)
    else:
        candidates = np.arange(len(values))
    order = np.argsort(-values[candidates], kind="stable")
    largest: np.ndarray = candidates[order[:n]]
    return largest
