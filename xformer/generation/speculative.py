"""Speculative decoding: a small model drafts a few tokens, a large one verifies them at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from xformer.dispatch.checks import require_sizes
from xformer.generation.compiled_decoding import CompiledTokens, compiled_tokens
from xformer.generation.prefix import (
    backend_of_params,
    fitting,
    opened,
    require_no_memory,
    require_writer,
    stop_ids,
)
from xformer.generation.samplers import Filter, pick, probabilities, require_filter, temperature
from xformer.generation.settings import n_tokens
from xformer.layers.recurrent_state import is_recurrent
from xformer.layers.rope_by_layer import frequency_length


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
    """Yield the ids that continue a prompt, in rounds of 1 to k + 1 ids.

    In a round, the draft model proposes k tokens, one after another, and the model reads them all
    at once. With the model's probability p(x) and the draft's q(x), a proposal x is accepted with
    probability min(1, p(x) / q(x)). The first rejected proposal is replaced by a token sampled from
    max(p - q, 0); if all are accepted, one more token is sampled from p. So every token has the
    distribution of the model alone (arXiv:2211.17192). If RoPE frequencies change with the length
    ("dynamic", "longrope"), a round ends before they change.

    model, draft: causal `LanguageModel`s or `EncoderDecoder`s of the same vocabulary size.
    prompt: token ids, at least one; for an encoder-decoder the source.
    k: proposals of a round, at least 1.
    max_new_tokens: the most ids that continue the prompt.
    sampler: applied to the logits of both models (`generation.samplers`); None: greedy decoding.
    stop: ids that end the text; the id itself is yielded.
    seed: of the random numbers.
    compiled: the draft decodes a token, and the model k + 1 tokens, by one compiled call
        (`xformer.compile`). True: a RuntimeWarning says why if that is not possible. None: compiled
        if numba's kernels run and max_new_tokens is at least `PAYS`.

    ValueError if the vocabulary sizes differ, for a model with memory_len, if prompt and
    max_new_tokens do not fit a context, for a bad prompt (`prefill`), and for logits that are not
    finite.
    """
    (k,) = require_sizes("speculative", 1, k=k)
    max_new_tokens, seed = require_sizes("speculative", 0, max_new_tokens=max_new_tokens, seed=seed)
    stops = stop_ids("speculative", stop)
    require_filter("speculative", sampler)
    readers = []
    for one, weights in ((model, params), (draft, draft_params)):
        require_writer("speculative", one)
        require_no_memory("speculative", one)
        _require_no_recurrence(one)
        fitting("speculative", one, [prompt], max_new_tokens)
        of_text = (one, weights, [prompt], max_new_tokens)
        tokens = compiled_tokens("speculative", *of_text, compiled=compiled)
        readers.append(Reader(one, weights, tokens))
    large, small = readers
    size, draft_size = n_tokens(model), n_tokens(draft)
    if size != draft_size:
        raise ValueError(
            f"speculative: the draft must have the model's {size} tokens, got {draft_size}"
        )
    sampler = temperature(0) if sampler is None else sampler
    return _rounds(large, small, prompt, k, max_new_tokens, sampler, stops, seed)


def _require_no_recurrence(model: Any) -> None:
    """ValueError for a model with recurrent layers, whose state cannot drop tokens."""
    if any(map(is_recurrent, getattr(model, "blocks", ()))):
        raise ValueError(
            "speculative: gated DeltaNet layers cannot drop the tokens of a wrong guess"
        )


class Reader:
    """A model and its state on one text, after the first `length` tokens.

    tokens: the compiled decoding, which holds the state; None: uncompiled, with states kept here.
    """

    def __init__(self, model: Any, params: Any, tokens: CompiledTokens | None) -> None:
        self.model, self.params, self.backend = model, params, backend_of_params(params)
        self.tokens, self.length = tokens, 0
        self._states: list[Any] = []  # the state after the last `keep`, and all later ones

    def steady(self, length: int, n: int) -> int:
        """The most tokens, up to n, that may follow `length` at the same RoPE frequencies."""
        rope = getattr(self.model, "rotary", None)
        now = frequency_length(rope, length)
        return max(i for i in range(n + 1) if frequency_length(rope, length + i) == now)

    def begin(self, prompt: Sequence[int]) -> list[int]:
        """Read all ids but the last, and return them: the prompt, or the start of a target."""
        with self.backend.active():
            state, ((*ids,),) = opened(self.model, self.params, [prompt], self.backend)
            # A KV cache is preallocated from a state with at least one token.
            first = ids if self.tokens is not None and len(ids) == 1 else ids[:-1]
            if first:
                state = self._decoded(state, first, all_logits=False)[1]
            if len(first) == len(ids):
                state = self.model.truncate(state, 1)
            self._states, self.length = [state], len(ids) - 1
            if self.tokens is not None:
                self.tokens.begin(self._states.pop())
        return ids

    def read(self, ids: Sequence[int], n: int) -> Any:
        """Read `ids`; return logits (T, V) after each.

        n: ids of a compiled call. If compiled, only the last call's logits are returned.
        """
        with self.backend.active():
            if self.tokens is not None:
                logits = self.tokens.read(self.length, ids, n)
            else:
                logits, state = self._decoded(self._states[-1], ids)
                self._states.append(state)
        self.length += len(ids)
        return logits

    def keep(self, length: int) -> None:
        """Truncate the text to `length` tokens. `length` is at least that of the last `keep`."""
        n = max(0, self.length - length)
        self.length -= n
        with self.backend.active():
            if self.tokens is not None:
                self.tokens.forget(n)
                return
            state = next(state for state in self._states if state.length >= self.length)
            n = state.length - self.length
            self._states = [self.model.truncate(state, n) if n else state]

    def _decoded(
        self, state: Any, ids: Sequence[int], *, all_logits: bool = True
    ) -> tuple[Any, Any]:
        tokens = self.backend.asarray(np.asarray([ids], dtype=np.int64))
        logits, state = self.model.decode(self.params, tokens, state, all_logits=all_logits)
        return self.backend.upcast(logits[0, ...]), state

    def probs(self, logits: Any, sampler: Filter, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Probabilities (T, V) of the next token of each text, by `logits` (T, V) and `sampler`."""
        with self.backend.active():
            return probabilities(self.backend.to_numpy(sampler(logits, texts)))


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
            drafted, q = _drafted(small, ids, n, sampler, rng)
            logits = large.read(ids[large.length :] + drafted, k + 1)
            texts = [ids + drafted[:i] for i in range(n + 1)]
            p = large.probs(logits[-(n + 1) :, :], sampler, texts)
            new = _accepted(drafted, q, p, rng)
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


def _drafted(
    small: Reader, ids: list[int], n: int, sampler: Filter, rng: np.random.Generator
) -> tuple[list[int], list[np.ndarray]]:
    """n proposals, and the distribution (V,) that each was sampled from."""
    drafted, q = list[int](), list[np.ndarray]()
    for _ in range(n):
        text = ids + drafted
        logits = small.read(text[small.length :], 1)
        probs = small.probs(logits[-1:, :], sampler, [text])
        drafted += pick(probs, [rng.random()])
        q.append(probs[0])
    return drafted, q


def _accepted(
    drafted: Sequence[int], q: Sequence[np.ndarray], p: np.ndarray, rng: np.random.Generator
) -> list[int]:
    """The proposals before the first rejected one, and one more token. p: (n + 1, V)."""
    for i, x in enumerate(drafted):
        if rng.random() * q[i][x] >= p[i, x]:
            residual = np.maximum(p[i] - q[i], 0)
            residual = residual if residual.any() else p[i]  # p = q up to rounding
            return [*drafted[:i], *pick(residual[None, :], [rng.random()])]
    return [*drafted, *pick(p[-1:, :], [rng.random()])]
