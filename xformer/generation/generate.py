"""One token after another: the likeliest, or one drawn from what a sampler leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from xformer import renamed
from xformer.backends import Backend
from xformer.checks import require_sizes
from xformer.compiling import records
from xformer.generation import samplers
from xformer.generation.compiled import PAYS, CompiledTokens, compiled_tokens, width_of
from xformer.generation.prefix import (
    PrefilledPrompt,
    checked,
    extended,
    fitting,
    network_of,
    place_of,
    prefill,
    stop_ids,
)
from xformer.generation.samplers import Filter, Ids, draw, greedy, require_filter, require_finite
from xformer.models import EncoderDecoder, LanguageModel
from xformer.typing import Array


@renamed.arguments(max_new="max_new_tokens", slide="sliding_context")
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
    """The ids that continue each prompt, with the one in `stop` that ended it; as `stream`."""
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


@renamed.arguments(max_new="max_new_tokens", slide="sliding_context")
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
    """Steps of generation: the next id of each prompt, None for one that has ended.

    prompts: a list of ids each, of any lengths; of an encoder-decoder the sources; or what
    `prefill` has read. A text ends after max_new_tokens ids, or with an id in stop, which comes
    too. sampler: the next id is drawn from softmax(sampler(logits, ids)) (`generation.samplers`);
    None takes the likeliest. A seed gives text i the same ids on every backend, whatever else is in
    the batch. slide: a text that fills the model's context goes on after its last tokens alone,
    which are read anew for each further one. compiled: a further token is one call of the library,
    where it has such a thing (`xformer.compile`), or some likeliest ones are, with the parameters
    as they are at the first of them; where it cannot be, a RuntimeWarning says why. The ids are the
    same; logits that a sampler is given may be written over by the next ones. Unless given, tokens
    are compiled where numba's kernels run and max_new_tokens is at least `PAYS`; with True prompts
    are compiled too (`prefill`). ValueError where prompt and max_new_tokens do not fit the context
    and slide is not given, for bad prompts (`prefill`), and for logits that are no numbers.
    """
    network = network_of("generate", model)
    max_new_tokens, seed = require_sizes("generate", 0, max_new_tokens=max_new_tokens, seed=seed)
    stops = stop_ids("generate", stop)
    require_filter("generate", sampler)
    if sliding_context and isinstance(network, EncoderDecoder):
        raise ValueError("generate: slide goes with a LanguageModel, got an EncoderDecoder")
    if sliding_context:
        prompts = prompts if isinstance(prompts, PrefilledPrompt) else checked(prompts)
    else:
        prompts = fitting("generate", network, prompts, max_new_tokens)
    n_texts = len(prompts.ids if isinstance(prompts, PrefilledPrompt) else prompts)
    rngs = [np.random.default_rng([seed, i]) for i in range(n_texts)]
    tokens, place = None, place_of(params)
    usual = max_new_tokens >= PAYS and records(params)
    if usual if compiled is None else compiled:
        most = width_of(network, prompts) + max(
            max_new_tokens - 1, 0
        )  # the last token needs no column
        kind: Any = {"asked": compiled, "is_greedy": sampler is None}
        tokens = compiled_tokens("generate", network, params, most, **kind)
    return _stream(network, params, prompts, max_new_tokens, sampler, stops, rngs, tokens, place)


def _stream(
    network: Any,
    params: Any,
    prompts: Ids | PrefilledPrompt,
    max_new_tokens: int,
    sampler: Filter | None,
    stops: frozenset[int],
    rngs: Sequence[np.random.Generator],
    tokens: CompiledTokens | None,
    place: Backend,
) -> Iterator[list[int | None]]:
    asked = tokens is not None and tokens.asked
    with place.active():
        if isinstance(prompts, PrefilledPrompt):
            text = prompts
        else:
            text = _read(network, params, prompts, compiled=asked)
    chosen: Array | None = None
    running, given = [True] * len(rngs), 0
    try:
        while given < max_new_tokens:
            with place.active():
                new = _choose(place, text, sampler, rngs, chosen)
            yield [i if runs else None for i, runs in zip(new, running, strict=True)]
            running = [runs and i not in stops for i, runs in zip(new, running, strict=True)]
            given += 1
            if given == max_new_tokens or not any(running):
                return
            most, width = 1 if sampler is not None else max_new_tokens - given, text.width + 1
            with place.active():
                text, chosen = _grown(network, params, text, new, tokens, place, most)
            for k in range(text.width - width, 0, -1):  # those that came with it
                new = [ids[-k] for ids in text.ids]
                _require_ids(place, text.logits, new)
                yield [i if runs else None for i, runs in zip(new, running, strict=True)]
                running = [runs and i not in stops for i, runs in zip(new, running, strict=True)]
                given += 1
                if not any(running):
                    return
    finally:
        if tokens is not None:
            tokens.close()


def _grown(
    network: Any,
    params: Any,
    text: PrefilledPrompt,
    new: Sequence[int],
    tokens: CompiledTokens | None,
    place: Backend,
    most: int,
) -> tuple[PrefilledPrompt, Array | None]:
    """The text with these tokens, and with those of the likeliest after them, up to `most` in all,
    that come with them; the likeliest next ones where they are known."""
    room = most if network.context is None else network.context - text.width
    if room <= 0:
        longer = [(*ids, i) for ids, i in zip(text.ids, new, strict=True)]
        return _read(network, params, longer, compiled=tokens is not None), None
    if tokens is not None:
        return tokens(text, new, min(most, room))
    return extended(network, params, text, new, place), None


def _read(network: Any, params: Any, prompts: Ids, *, compiled: bool) -> PrefilledPrompt:
    """The prompts, or their ends where they do not fit the context."""
    if network.context is not None and isinstance(network, LanguageModel):
        prompts = [prompt[-network.context :] for prompt in prompts]
    return prefill(network, params, prompts, compiled=compiled)


def _choose(
    place: Backend,
    text: PrefilledPrompt,
    sampler: Filter | None,
    rngs: Sequence[np.random.Generator],
    chosen: Array | None,
) -> list[int]:
    """The next token of each text. chosen: the likeliest ones, where they are known."""
    if sampler is None:
        chosen = greedy(text.logits) if chosen is None else chosen
        new: list[int] = place.to_numpy(chosen).tolist()
        _require_ids(place, text.logits, new)
        return new
    return draw(place.to_numpy(sampler(text.logits, text.ids)), [rng.random() for rng in rngs])


def _require_ids(place: Backend, logits: Array, new: Sequence[int]) -> None:
    """ValueError where a text has no likeliest token, by these logits or those before them."""
    if min(new) < 0:
        require_finite("generate", place.to_numpy(place.xp.max(logits, axis=-1)))
        raise ValueError("generate: the largest logit of each row must be finite")


@renamed.arguments(max_new="max_new_tokens")
def sample(
    model: Any,
    params: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    backend: Any = None,
) -> Iterator[int]:
    """Yield `max_new_tokens` token ids that continue the prompt.

    Each is drawn from softmax(logits / temperature), of the `top_k` most likely ids only where
    given; temperature 0 takes the most likely one. The model sees as many of the last tokens as fit
    its context. backend: not needed any more. ValueError for an empty prompt and bad numbers.
    """
    filters = [samplers.temperature(temperature)]
    if top_k is not None:
        filters.append(samplers.top_k(top_k))
    sampler = samplers.compose(*filters)
    options: Any = {"sampler": sampler, "seed": seed, "sliding_context": True}
    steps = stream(model, params, [list(prompt)], max_new_tokens=max_new_tokens, **options)
    return (new for (new,) in steps if new is not None)
