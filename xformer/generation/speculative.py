"""Speculative decoding: a small model guesses a few tokens, a large one reads them at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from xformer import renamed
from xformer.checks import require_sizes
from xformer.compiling import records
from xformer.generation.compiled import PAYS, CompiledTokens, compiled_tokens, width_of
from xformer.generation.prefix import fitting, network_of, opened, place_of, stop_ids
from xformer.generation.samplers import Filter, pick, probabilities, require_filter, temperature


@renamed.arguments(max_new="max_new_tokens")
def speculative(
    model: Any,
    params: Any,
    draft: Any,
    draft_params: Any,
    prompt: Sequence[int],
    *,
    k: int,
    max_new_tokens: int,
    sampler: Filter | None = None,
    stop: Collection[int] | None = (),
    seed: int = 0,
    compiled: bool | None = None,
) -> Iterator[list[int]]:
    """The ids that continue a prompt, in rounds of 1 to k + 1 of them.

    In a round the draft, a model of the same vocabulary, proposes k tokens, one after another. The
    model reads them all at once. Of its probability p(x) and the draft's q(x), a proposal x is kept
    with probability min(1, p(x) / q(x)). In the place of the first that is not comes a token drawn
    from max(p - q, 0), after the last that is one from p: every token has the distribution that the
    model alone would give it (arXiv:2211.17192). sampler: as in `stream`, of both; without one the
    ids are those of greedy decoding. Where RoPE frequencies change with the length ("dynamic",
    "longrope") a round ends before the model's frequencies change. max_new_tokens, stop, seed: as
    in `stream`. compiled: the draft reads a token, the model k + 1 of them, by one call of the
    library (`xformer.compile`); where that cannot be, a RuntimeWarning says why. Unless given, of
    models that numba's kernels compute, where max_new_tokens is at least `PAYS`. ValueError as in
    `stream`, and where the vocabularies differ.
    """
    (k,) = require_sizes("speculative", 1, k=k)
    max_new_tokens, seed = require_sizes("speculative", 0, max_new_tokens=max_new_tokens, seed=seed)
    stops = stop_ids("speculative", stop)
    require_filter("speculative", sampler)
    readers = []
    for network, its in ((model, params), (draft, draft_params)):
        network, tokens = network_of("speculative", network), None
        fitting("speculative", network, [prompt], max_new_tokens)
        if max_new_tokens >= PAYS and records(its) if compiled is None else compiled:
            most = width_of(network, [prompt]) + max(max_new_tokens - 1, 0)
            tokens = compiled_tokens("speculative", network, its, most, asked=compiled)
        readers.append(Reader(network, its, tokens))
    large, small = readers
    if large.vocab_size != small.vocab_size:
        raise ValueError(
            f"speculative: the draft must have the model's {large.vocab_size} tokens, got "
            f"{small.vocab_size}"
        )
    sampler = temperature(0) if sampler is None else sampler
    return _rounds(large, small, prompt, k, max_new_tokens, sampler, stops, seed)


class Reader:
    """A model on one text, of which it has read the first `length` tokens.

    tokens: calls that read them, in columns which they hold; without, states are kept.
    """

    def __init__(self, network: Any, params: Any, tokens: CompiledTokens | None) -> None:
        self.network, self.params, self.place = network, params, place_of(params)
        self.tokens, self.length = tokens, 0
        self._states: list[Any] = []  # that after the last `keep`, and those after it

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

    def begin(self, prompt: Sequence[int]) -> list[int]:
        """The ids, all but the last of which are then read."""
        with self.place.active():
            state, ((*ids,),) = opened(self.network, self.params, [prompt], self.place)
            # Columns are those of a text with a token.
            first = ids if self.tokens is not None and len(ids) == 1 else ids[:-1]
            if first:
                state = self._decoded(state, first, all_logits=False)[1]
            if len(first) == len(ids):
                state = self.network.truncate(state, 1)
            self._states, self.length = [state], len(ids) - 1
            if self.tokens is not None:
                self.tokens.begin(self._states.pop())
        return ids

    def read(self, ids: Sequence[int], n: int) -> Any:
        """Logits (T, V) after each of the next ids; where compiled after the last of them, of which
        n at a time are read."""
        with self.place.active():
            if self.tokens is not None:
                logits = self.tokens.read(self.length, ids, n)
            else:
                logits, state = self._decoded(self._states[-1], ids)
                self._states.append(state)
        self.length += len(ids)
        return logits

    def keep(self, length: int) -> None:
        """Forget all but the first `length` tokens, those read before the last `keep` at least."""
        n = max(0, self.length - length)
        self.length -= n
        with self.place.active():
            if self.tokens is not None:
                self.tokens.forget(n)
                return
            state = next(state for state in self._states if state.length >= self.length)
            n = state.length - self.length
            self._states = [self.network.truncate(state, n) if n else state]

    def _decoded(
        self, state: Any, ids: Sequence[int], *, all_logits: bool = True
    ) -> tuple[Any, Any]:
        tokens = self.place.asarray(np.asarray([ids], dtype=np.int64))
        logits, state = self.network.decode(self.params, tokens, state, all_logits=all_logits)
        return self.place.upcast(logits[0, ...]), state

    def probs(self, logits: Any, sampler: Filter, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Probabilities (T, V) of the token after each of the texts."""
        with self.place.active():
            return probabilities(self.place.to_numpy(sampler(logits, texts)))


def _rounds(
    large: Reader,
    small: Reader,
    prompt: Sequence[int],
    k: int,
    max_new_tokens: int,
    sampler: Filter,
    stops: frozenset[int],
    seed: int,
) -> Iterator[list[int]]:
    rng = np.random.default_rng([seed, 0])
    try:
        ids, _ = large.begin(prompt), small.begin(prompt)
        while max_new_tokens:
            n = large.steady(len(ids), min(k, max_new_tokens - 1))
            guesses, q = _guessed(small, ids, n, sampler, rng)
            logits = large.read(ids[large.length :] + guesses, k + 1)
            texts = [ids + guesses[:i] for i in range(n + 1)]
            p = large.probs(logits[-(n + 1) :, :], sampler, texts)
            new = _kept(guesses, q, p, rng)
            for reader in (large, small):
                reader.keep(len(ids) + len(new) - 1)
            ended = [i + 1 for i, x in enumerate(new) if x in stops]
            yield new[: min(ended, default=len(new))]
            if ended:
                return
            ids += new
            max_new_tokens -= len(new)
    finally:
        for tokens in (large.tokens, small.tokens):
            if tokens is not None:
                tokens.close()


def _guessed(
    small: Reader, ids: list[int], n: int, sampler: Filter, rng: np.random.Generator
) -> tuple[list[int], list[np.ndarray]]:
    """n proposals, and the distribution that each was drawn from."""
    guesses, q = list[int](), list[np.ndarray]()
    for _ in range(n):
        text = ids + guesses
        logits = small.read(text[small.length :], 1)
        probs = small.probs(logits[-1:, :], sampler, [text])
        guesses += pick(probs, [rng.random()])
        q.append(probs[0])
    return guesses, q


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
