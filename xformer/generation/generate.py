"""Greedy decoding and sampling, one token at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from xformer.backends import Backend
from xformer.base.typing import Array
from xformer.dispatch.checks import require_sizes
from xformer.generation import samplers
from xformer.generation.compiled_decoding import CompiledTokens, compiled_tokens
from xformer.generation.prefix import (
    PrefilledPrompt,
    backend_of_params,
    checked,
    extended,
    fitting,
    prefill,
    require_writer,
    stop_ids,
)
from xformer.generation.samplers import Filter, Ids, draw, require_filter, require_finite
from xformer.models import EncoderDecoder, LanguageModel
from xformer.ops.greedy import greedy


def generate(
    model: Any,
    params: Any,
    prompts: Ids | PrefilledPrompt,
    *,
    max_new_tokens: int,
    sampler: Filter | None = None,
    stop: Collection[int] | None = (),
    seed: int = 0,
    sliding_context: bool = False,
    compiled: bool | None = None,
) -> list[list[int]]:
    """The ids that continue each prompt, including the one of `stop` that ended it.

    For the arguments and errors see `stream`.
    """
    options: Any = {
        "sampler": sampler,
        "stop": stop,
        "seed": seed,
        "sliding_context": sliding_context,
    }
    options["compiled"] = compiled
    steps = list(stream(model, params, prompts, max_new_tokens=max_new_tokens, **options))
    n_texts = len(prompts.ids if isinstance(prompts, PrefilledPrompt) else prompts)
    return [[new for step in steps if (new := step[i]) is not None] for i in range(n_texts)]


def stream(
    model: Any,
    params: Any,
    prompts: Ids | PrefilledPrompt,
    *,
    max_new_tokens: int,
    sampler: Filter | None = None,
    stop: Collection[int] | None = (),
    seed: int = 0,
    sliding_context: bool = False,
    compiled: bool | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next id of each prompt, step by step; None for a prompt that has ended.

    model: a causal `LanguageModel` or an `EncoderDecoder`, with a head over its vocabulary.
    prompts: a list of token ids each, of any lengths; for an encoder-decoder the sources; or what
        `prefill` read.
    max_new_tokens: the most ids that continue a prompt.
    sampler: the next id is sampled from softmax(sampler(logits, ids)) (`generation.samplers`);
        None: greedy decoding.
    stop: ids that end a text; the id itself is yielded.
    seed: text i gets the same ids on every backend and in every batch.
    sliding_context: if a text fills the model's context, continue it with only its last tokens,
        which are read again for each new one.
    compiled: decode each token, or several greedy ones, by one compiled call (`xformer.compile`),
        with the parameters at the first of them. The ids are the same. A later step may overwrite
        the logits that the sampler got. True: prompts are compiled too (`prefill`), and a
        RuntimeWarning says why if nothing can be compiled. None: compiled if numba's kernels run
        and max_new_tokens is at least `PAYS`.

    ValueError if prompt and max_new_tokens do not fit the context (without sliding_context), for
    bad prompts (`prefill`), and for logits that are not finite.
    """
    require_writer("generate", model)
    max_new_tokens, seed = require_sizes("generate", 0, max_new_tokens=max_new_tokens, seed=seed)
    stops = stop_ids("generate", stop)
    require_filter("generate", sampler)
    if sliding_context and isinstance(model, EncoderDecoder):
        raise ValueError("generate: sliding_context needs a LanguageModel, got an EncoderDecoder")
    if sliding_context:
        prompts = prompts if isinstance(prompts, PrefilledPrompt) else checked(prompts)
    else:
        prompts = fitting("generate", model, prompts, max_new_tokens)
    n_texts = len(prompts.ids if isinstance(prompts, PrefilledPrompt) else prompts)
    rngs = [np.random.default_rng([seed, i]) for i in range(n_texts)]
    backend = backend_of_params(params)
    kind: Any = {"compiled": compiled, "is_greedy": sampler is None}
    tokens = compiled_tokens("generate", model, params, prompts, max_new_tokens, **kind)
    return _stream(model, params, prompts, max_new_tokens, sampler, stops, rngs, tokens, backend)


def _stream(
    model: Any,
    params: Any,
    prompts: Ids | PrefilledPrompt,
    max_new_tokens: int,
    sampler: Filter | None,
    stops: frozenset[int],
    rngs: Sequence[np.random.Generator],
    tokens: CompiledTokens | None,
    backend: Backend,
) -> Iterator[list[int | None]]:
    asked = tokens is not None and tokens.asked
    with backend.active():
        if isinstance(prompts, PrefilledPrompt):
            text = prompts
        else:
            text = _read(model, params, prompts, compiled=asked)
    chosen: np.ndarray | None = None
    running, n_new = [True] * len(rngs), 0
    try:
        while n_new < max_new_tokens:
            with backend.active():
                new = _choose(backend, text, sampler, rngs, chosen)
            yield [i if runs else None for i, runs in zip(new, running, strict=True)]
            running = [runs and i not in stops for i, runs in zip(new, running, strict=True)]
            n_new += 1
            if n_new == max_new_tokens or not any(running):
                return
            most, width = 1 if sampler is not None else max_new_tokens - n_new, text.width + 1
            with backend.active():
                text, chosen = _grown(model, params, text, new, tokens, backend, most)
            for k in range(text.width - width, 0, -1):  # greedy ids of the same compiled call
                new = [ids[-k] for ids in text.ids]
                _require_ids(backend, text.logits, new)
                yield [i if runs else None for i, runs in zip(new, running, strict=True)]
                running = [runs and i not in stops for i, runs in zip(new, running, strict=True)]
                n_new += 1
                if not any(running):
                    return
    finally:
        if tokens is not None:
            tokens.close()


def _grown(
    model: Any,
    params: Any,
    text: PrefilledPrompt,
    new: Sequence[int],
    tokens: CompiledTokens | None,
    backend: Backend,
    most: int,
) -> tuple[PrefilledPrompt, np.ndarray | None]:
    """The text after the tokens `new`, and the next greedy ids if they are known.

    A compiled call may append further greedy ids, up to `most` tokens in all. A text that fills the
    context is read again without its first tokens.
    """
    free = most if model.context is None else model.context - text.width
    if free <= 0:
        longer = [(*ids, i) for ids, i in zip(text.ids, new, strict=True)]
        return _read(model, params, longer, compiled=tokens is not None), None
    if tokens is not None:
        return tokens(text, new, min(most, free))
    return extended(model, params, text, new, backend), None


def _read(model: Any, params: Any, prompts: Ids, *, compiled: bool) -> PrefilledPrompt:
    """Read the prompts; of a prompt longer than the context, only its last tokens."""
    if model.context is not None and isinstance(model, LanguageModel):
        prompts = [prompt[-model.context :] for prompt in prompts]
    return prefill(model, params, prompts, compiled=compiled)


def _choose(
    backend: Backend,
    text: PrefilledPrompt,
    sampler: Filter | None,
    rngs: Sequence[np.random.Generator],
    chosen: np.ndarray | None,
) -> list[int]:
    """The next token of each text. chosen: the greedy ones if they are known."""
    if sampler is None:
        if chosen is None:
            chosen = backend.to_numpy(greedy(text.logits))
        new: list[int] = chosen.tolist()
        _require_ids(backend, text.logits, new)
        return new
    return draw(backend.to_numpy(sampler(text.logits, text.ids)), [rng.random() for rng in rngs])


def _require_ids(backend: Backend, logits: Array, new: Sequence[int]) -> None:
    """ValueError if `new` has -1, for a text whose largest logit is not finite."""
    if min(new) < 0:
        with backend.active():
            require_finite("generate", backend.to_numpy(backend.xp.max(logits, axis=-1)))
        raise ValueError("generate: the largest logit of each row must be finite")


def sample(
    model: Any,
    params: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `max_new_tokens` token ids that continue the prompt.

    prompt: token ids, at least one. If it is longer than the context, its last tokens are read.
    temperature: ids are sampled from softmax(logits / temperature); 0: greedy decoding.
    top_k: sample from the `top_k` most likely ids only.
    seed: of the random numbers.

    ValueError for an empty prompt and bad numbers.
    """
    filters = [samplers.temperature(temperature)]
    if top_k is not None:
        filters.append(samplers.top_k(top_k))
    sampler = samplers.compose(*filters)
    options: Any = {"sampler": sampler, "seed": seed, "sliding_context": True}
    steps = stream(model, params, [list(prompt)], max_new_tokens=max_new_tokens, **options)
    return (new for (new,) in steps if new is not None)
