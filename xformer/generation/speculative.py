"""Speculative decoding: a small model guesses a few tokens, a large one reads them at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Backend
from xformer.checks import require_sizes
from xformer.generation.prefix import fitting, network_of, opened, place_of, stop_ids
from xformer.generation.samplers import Filter, pick, probabilities, require_filter, temperature


def speculative(
    model: Any,
    params: Any,
    draft: Any,
    draft_params: Any,
    prompt: Sequence[int],
    *,
    k: int,
    max_new: int,
    sampler: Filter | None = None,
    stop: Collection[int] | None = (),
    seed: int = 0,
) -> Iterator[list[int]]:
    """The ids that continue a prompt, in rounds of 1 to k + 1 of them.

    In a round the draft, a model of the same vocabulary, proposes k tokens, one after another. The
    model reads them all at once. Of its probability p(x) and the draft's q(x), a proposal x is kept
    with probability min(1, p(x) / q(x)). In the place of the first that is not comes a token drawn
    from max(p - q, 0), after the last that is one from p: every token has the distribution that the
    model alone would give it (arXiv:2211.17192). sampler: as in `stream`, of both; without one the
    ids are those of greedy decoding. Where RoPE frequencies change with the length ("dynamic",
    "longrope") a round ends before the model's frequencies change. max_new, stop, seed: as in
    `stream`. ValueError as there, and where the vocabularies differ.
    """
    (k,) = require_sizes("speculative", 1, k=k)
    max_new, seed = require_sizes("speculative", 0, max_new=max_new, seed=seed)
    stops = stop_ids("speculative", stop)
    require_filter("speculative", sampler)
    readers = []
    for network, its in ((model, params), (draft, draft_params)):
        network = network_of("speculative", network)
        fitting("speculative", network, [prompt], max_new)
        readers.append(Reader(network, its, place_of(its)))
    large, small = readers
    if large.vocab_size != small.vocab_size:
        raise ValueError(
            f"speculative: the draft must have the model's {large.vocab_size} tokens, got "
            f"{small.vocab_size}"
        )
    sampler = temperature(0) if sampler is None else sampler
    return _rounds(large, small, prompt, k, max_new, sampler, stops, seed)


class Reader(NamedTuple):
    """A model on one text."""

    network: Any
    params: Any
    place: Backend

    @property
    def vocab_size(self) -> int:
        """V."""
        embed = getattr(self.network, "target_embed", None) or self.network.embed
        return int(embed.vocab_size)

    def steady(self, length: int, n: int) -> int:
        """How many tokens, at most n, may follow `length` of them at the same RoPE frequencies."""
        rope = getattr(self.network, "rotary", None)
        if rope is None:
            return n
        now = rope.frequency_length(length)
        return max(i for i in range(n + 1) if rope.frequency_length(length + i) == now)

    def begin(self, prompt: Sequence[int]) -> tuple[Any, list[int]]:
        """The state in which all but the last id has been read, and the ids."""
        with self.place.active():
            state, ((*ids,),) = opened(self.network, self.params, [prompt], self.place)
        if ids[:-1]:
            _, state = self.read(state, ids[:-1], every=False)
        return state, ids

    def read(self, state: Any, ids: Sequence[int], *, every: bool = True) -> tuple[Any, Any]:
        """Logits (T, V) after each of ids (T,), and the state."""
        with self.place.active():
            tokens = self.place.asarray(np.asarray([ids], dtype=np.int64))
            logits, state = self.network.extend(self.params, tokens, state, every=every)
            logits = self.place.widened(logits[0, ...])
        return logits, state

    def probs(self, logits: Any, sampler: Filter, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Probabilities (T, V) of the token after each of the texts."""
        with self.place.active():
            return probabilities(self.place.to_numpy(sampler(logits, texts)))


def _rounds(
    large: Reader,
    small: Reader,
    prompt: Sequence[int],
    k: int,
    max_new: int,
    sampler: Filter,
    stops: frozenset[int],
    seed: int,
) -> Iterator[list[int]]:
    rng = np.random.default_rng([seed, 0])
    (state, ids), (small_state, _) = large.begin(prompt), small.begin(prompt)
    while max_new:
        n = large.steady(len(ids), min(k, max_new - 1))
        guesses, q, small_states = _guessed(small, small_state, ids, n, sampler, rng)
        logits, state = large.read(state, ids[state.length :] + guesses)
        texts = [ids + guesses[:i] for i in range(n + 1)]
        p = large.probs(logits[-(n + 1) :, :], sampler, texts)
        new = _kept(guesses, q, p, rng)
        unread = n + 1 - len(new)  # guesses that were refused
        state = large.network.rewind(state, unread)
        small_state = small_states[min(len(new), n)]
        ended = [i + 1 for i, x in enumerate(new) if x in stops]
        yield new[: min(ended, default=len(new))]
        if ended:
            return
        ids += new
        max_new -= len(new)


def _guessed(
    small: Reader, state: Any, ids: list[int], n: int, sampler: Filter, rng: np.random.Generator
) -> tuple[list[int], list[np.ndarray], list[Any]]:
    """n proposals, the distribution that each was drawn from, and the states on the way.

    The last of the states are those before the first proposal was made, before the second, ...
    """
    guesses, q, states = list[int](), list[np.ndarray](), [state]
    for _ in range(n):
        text = ids + guesses
        logits, state = small.read(state, text[state.length :])
        probs = small.probs(logits[-1:, :], sampler, [text])
        guesses += pick(probs, [rng.random()])
        q.append(probs[0])
        states.append(state)
    return guesses, q, states


def _kept(
    guesses: Sequence[int], q: Sequence[np.ndarray], p: np.ndarray, rng: np.random.Generator
) -> list[int]:
    """The proposals up to the first that is refused, and one token more. p: (n + 1, V)."""
    for i, x in enumerate(guesses):
        if rng.random() * q[i][x] >= p[i, x]:
            rest = np.maximum(p[i] - q[i], 0)
            rest = rest if rest.any() else p[i]  # p = q but for rounding
            return [*guesses[:i], *pick(rest[None, :], [rng.random()])]
    return [*guesses, *pick(p[-1:, :], [rng.random()])]
