"""`LanguageModel.extend` by one token in one call, and of a small model by some likeliest ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from xformer.backends.numba import extend_loops, token
from xformer.backends.numba.advance import FLOAT, TEXTS, memory_of, tables_of
from xformer.backends.numba.atomic import nothing_done, on_all
from xformer.backends.numba.layer import LENGTH
from xformer.backends.numba.linear import LEAST, piece
from xformer.backends.numba.reading import Reading, grown, reading_of
from xformer.backends.numba.together import Together
from xformer.backends.numpy.threads import n_threads

from xformer.checks import require_ids
from xformer.models.language_model import LanguageModel, LanguageModelParams
from xformer.models.state import State
from xformer.typing import Array

READ = 1 << 28  # bytes of weights, keys and values in one call, at most: some 10 ms
MOST = 16  # tokens
NONE = np.empty(0, np.int64)


def outside(
    tokens: Array,
    params: LanguageModelParams,
    *,
    model: LanguageModel,
    state: State,
    mask: Array | None = None,
    every: bool = False,
) -> str | None:
    """Why the kernel cannot run."""
    if mask is not None or state.mask is not None or state.is_fixed:
        return "padding, or fixed columns"
    if tokens.shape[1] != 1 or not 0 < len(tokens) <= TEXTS:
        return f"not one token after others, of at most {TEXTS} texts"
    read = reading_of(model, params, state.past, len(tokens))
    if isinstance(read, str):
        return read
    if read[1].length != state.length:
        return "not as many keys as the text has tokens"
    beyond = model.rotary is not None and state.length >= model.rotary.same_until
    if beyond or state.rope_length:
        return "rotary positions whose frequencies change with the length"
    if tokens.dtype.kind not in "iu":
        return "tokens that are no integers"
    return None if _fit(tokens[:, 0].tolist(), model) else "tokens that the model has not"


def _fit(ids: list[int], model: LanguageModel) -> bool:
    return min(ids) >= 0 and max(ids) < model.embed.vocab_size  # type: ignore[union-attr]


def language_model_extend(
    tokens: Array,
    params: LanguageModelParams,
    *,
    model: LanguageModel,
    state: State,
    mask: Array | None = None,
    every: bool = False,
) -> tuple[Array, State]:
    """Its vectors through all layers to logits; of a large model on all threads."""
    _, logits, state = ahead(tokens, params, network=model, state=state, most=1, stop=())
    return logits[:, None] if every else logits, state


def not_ahead(
    tokens: Array, params: Any, *, network: Any, state: Any, most: int, stop: Collection[int]
) -> str | None:
    """Why no more than a token can be read."""
    if type(network) is not LanguageModel:
        return "a model of another kind"
    if most < 2 or len(tokens) != 1:
        return "not several tokens of one text"
    if not network.causal:
        return "a model that is not causal"
    if network.context is not None and state.length + most > network.context:
        return "more tokens than fit the model's context"
    why = outside(tokens, params, model=network, state=state)
    if why is not None:
        return why
    read: Any = reading_of(network, params, state.past, 1)
    known, past = read
    if _how_many(known, past, most) > 1:
        return None
    return "weights that take long to read, or full buffers"


def ahead(
    tokens: Array, params: Any, *, network: Any, state: Any, most: int, stop: Collection[int]
) -> tuple[list[list[int]], Array, State]:
    """All in one call, in which Python has nothing to do; with most = 1 of several texts too."""
    read = reading_of(network, params, state.past, len(tokens))
    if isinstance(read, str):
        raise ValueError(f"extend: {read}")
    known, before = read
    ids = tokens.astype(np.int64)  # a copy, checked again: the caller's may have been refilled
    if not _fit(ids[:, 0].tolist(), network):
        require_ids("embedding", "ids", ids, network.embed.vocab_size, ids)
    n = _how_many(known, before, most)
    past = grown(known, before, n)
    stops = NONE
    if n > 1:
        ids = np.concat((ids, np.full((1, n - 1), -1)), axis=1)
        size = network.embed.vocab_size
        stops = np.array([i for i in stop if 0 <= i < size], np.int64)
    logits = _logits(past.known, before.length, ids, stops, (params, past))
    more = [[i for i in row if i >= 0] for row in ids[:, 1:].tolist()]
    n_read = 1 + len(more[0])
    if n_read < n:
        past.shorten(n - n_read)
    return more, logits, state.grown(past, None, ids[:, :n_read])


def _how_many(known: Reading, past: Together, most: int) -> int:
    """Tokens that are read at once: what is soon done, and of which there are columns; one."""
    keys = 4 * past.length * sum(g * (k + m) for g, k, m in known.plan.heads)
    n, rotary = READ // (known.weights + keys), known.model.rotary
    n = min(most, n, MOST, past.capacity - past.length)
    if rotary is not None:
        n = int(min(n, rotary.same_until - past.length))
    return max(n, 1)


def _logits(known: Reading, length: int, ids: Array, stop: Array, owners: Any) -> Array:
    """Those after the last token that is read; ids (B, n) of others than the first come in."""
    model, plan, (n_texts, n) = known.model, known.plan, ids.shape
    size, width = model.embed.vocab_size, model.d_model  # type: ignore[union-attr]
    rooms = known.rooms.copy()
    rooms[:, LENGTH] = length + 1
    interleaved = model.rotary is not None and model.rotary.interleaved
    turns = known.turns[length : length + n]
    scale = float(model.embed.scale)  # type: ignore[union-attr]
    vectors = known.table, known.positions, scale, length
    threads = n_threads() if plan.large or width * size > LEAST else 1
    w, bias = known.head
    head, logits = (w, piece(width, size, threads), bias), np.empty((n_texts, size), FLOAT)
    given = tables_of(plan, rooms), turns, interleaved, vectors, ids, head, logits, stop
    stages = nothing_done(n * (token.STAGES * len(model.blocks) + extend_loops.MORE))
    memory = memory_of(plan, n_texts, width)
    on_all(extend_loops.extend_all, (*given, memory), stages, owners, threads)
    return logits
