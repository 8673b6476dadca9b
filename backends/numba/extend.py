"""`LanguageModel.extend` by one token in one call, and of a small model by some likeliest ones."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.append import reserved
from xformer.backends.numba import extend_loops, token
from xformer.backends.numba.advance import FLOAT, TEXTS, addresses, memory_of, tables_of
from xformer.backends.numba.atomic import nothing_done, on_all
from xformer.backends.numba.layer import LENGTH
from xformer.backends.numba.linear import LEAST, piece, place_of
from xformer.backends.numba.plan import Plan, Unfit, map_of, planned, require
from xformer.backends.numba.together import Together
from xformer.backends.numpy.threads import n_threads

from xformer import layers
from xformer.layers.linear import LinearParams
from xformer.layers.past import Past
from xformer.models import LMHead
from xformer.models.language_model import LanguageModel, LanguageModelParams
from xformer.models.state import State
from xformer.tree import value
from xformer.typing import Array

READ = 1 << 28  # bytes of weights in one call, at most: some 10 ms
MOST = 16  # tokens
NONE = np.empty(0, np.int64)

Placed = tuple[int, int, int]  # as `place_of`


class Reading(NamedTuple):
    """What is known of a model and of where its keys and values are, for the next token."""

    model: LanguageModel
    params: LanguageModelParams  # which live as long
    plan: Plan  # of the layers
    n_texts: int
    table: Placed  # (V, D)
    positions: Placed  # (L, D), from that of the first token on; zeros of none
    head: tuple[Placed, int]  # w (D, V), as `columns` has it, and b (V,), or 0
    ahead: int  # tokens in a call, at most
    turns: Array  # (S, 2, 1, R/2), cosines and sines of all tokens that there is room for
    rooms: Array  # (L, 7), as `layer` has a past


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
    read = _read(model, params, state.past, len(tokens))
    if isinstance(read, str):
        return read
    if read[1].length != state.length:
        return "not as many keys as the text has tokens"
    if model.rotary is not None and state.length >= model.rotary.same_until:
        return "rotary positions whose frequencies change with the length"
    if tokens.dtype.kind not in "iu":
        return "tokens that are no integers"
    size = model.embed.vocab_size  # type: ignore[union-attr]
    if not all(0 <= i < size for i in tokens[:, 0].tolist()):
        return "tokens that the model has not"
    return None


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
    _, logits, state = _run(tokens, params, model, state, 1, ())
    return logits[:, None] if every else logits, state


def not_ahead(
    tokens: Array, params: Any, *, network: Any, state: Any, most: int, stop: Collection[int]
) -> str | None:
    """Why no more than a token can be read."""
    if most < 2 or len(tokens) != 1 or not isinstance(network, LanguageModel):
        return "not several tokens of one text of a LanguageModel"
    if not network.causal:
        return "a model that is not causal"
    if network.context is not None and state.length + most > network.context:
        return "more tokens than fit the model's context"
    why = outside(tokens, params, model=network, state=state)
    if why is not None:
        return why
    read = _read(network, params, state.past, 1)
    return None if read[0].ahead > 1 else "weights that take long to read"  # type: ignore[union-attr]


def ahead(
    tokens: Array, params: Any, *, network: Any, state: Any, most: int, stop: Collection[int]
) -> tuple[Array, Array, State]:
    """All in one call, in which Python has nothing to do."""
    return _run(tokens, params, network, state, most, stop)


def _run(
    tokens: Array, params: Any, model: LanguageModel, state: State, most: int, stop: Collection[int]
) -> tuple[Array, Array, State]:
    """As `ahead`."""
    read = _read(model, params, state.past, len(tokens))
    if isinstance(read, str):
        raise ValueError(f"language_model_extend: {read}")
    known, before = read
    n = _how_many(known, before, most)
    past = _grown(known, before, n)
    ids, stops = tokens.astype(np.int64), NONE
    if n > 1:
        ids = np.concat((ids, np.full((1, n - 1), -1)), axis=1)
        stops = np.fromiter(stop, np.int64, len(stop))
    logits = _logits(past.known, before.length, ids, stops, (params, past))
    n_read = sum(i >= 0 for i in ids[0].tolist())
    past.length += n_read - n  # the columns that it has got and not used
    return ids[:, 1:n_read], logits, state.grown(past, None, n_read)


def _how_many(known: Reading, past: Together, most: int) -> int:
    """Tokens that are read at once: no more than there are columns for, but one at least."""
    n, rotary = min(most, known.ahead, past.capacity - past.length), known.model.rotary
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


def _read(
    model: LanguageModel, params: LanguageModelParams, past: Sequence[Past], n_texts: int
) -> tuple[Reading, Together] | str:
    """What the past remembers, or anew; or why there is nothing."""
    if isinstance(past, Together):
        known: Reading = past.known
        if (known.model, known.n_texts) == (model, n_texts) and known.params is params:
            return known, past
    why = _other(model, params)
    if why is not None:
        return why
    together = Together.of(past)
    plan = None if together is None else planned(params.stack, model.blocks, past)
    if together is None or plan is None or len(past) != len(model.blocks):
        return "not one token after others, whose keys and values lie where it can put its own"
    if plan.refusal is not None:
        return plan.refusal
    for room, heads in zip(together.rooms, plan.heads, strict=True):
        k, v = room.k, room.v
        found = *k.shape[:2], k.shape[3], v.shape[3], k.dtype, v.dtype
        if found != (n_texts, *heads, FLOAT, FLOAT):
            return "keys and values of another kind"
    kept: Reading | None = together.rooms[0].reading
    if kept is not None and kept.model == model and kept.params is params:
        return _moved(kept, together), together
    try:
        made = _made(model, params, plan, n_texts, together)
    except Unfit as unfit:
        return str(unfit)
    together.rooms[0].reading = made
    return made, together


def _other(model: LanguageModel, params: LanguageModelParams) -> str | None:
    """Why its vectors, scores or logits are others than the kernel has."""
    embed, own, head = model.embed, params.embed, model.head
    if embed is None or own is None or embed.positions not in ("none", "learned"):
        return "positions that are neither learned nor rotary"
    if embed.mode != "add" or not (own.project is own.types is own.norm is None):
        return "vectors that are more than a token's and its position's"
    if not isinstance(head, LMHead) or head.softcap is not None or head.scale != 1.0:
        return "logits that are scaled or capped"
    if model.alibi:
        return "a bias of scores"
    if any(config.window is not None for config in model.blocks):
        return "a window, which drops keys"
    return None


def _made(
    model: LanguageModel,
    params: LanguageModelParams,
    plan: Plan,
    n_texts: int,
    past: Together,
) -> Reading:
    """Unfit where the loops cannot read it."""
    embed: Any = model.embed
    own: Any = params.embed
    size, width = embed.vocab_size, embed.d_model
    table, positions = value(own.table), value(own.positions)
    require(table, (size, width))
    places = 0, 0, 0
    if embed.positions == "learned":
        require(positions, (embed.rows, width))
        places = place_of(positions[embed.offset :])
    if model.rotary is not None and model.rotary.width > min(k for _, k, _ in plan.heads):
        raise Unfit("rotary positions of another kind")
    head = LinearParams(table.T, None) if params.head is None else params.head
    w, step, by_rows, _, _, bias = map_of(head, width, size)
    weights = w, *((step, 1) if by_rows else (1, step))
    ahead = max(1, min(MOST, READ // (4 * (plan.weights + width * size))))
    none = np.empty(0, FLOAT)
    made = model, params, plan, n_texts, place_of(table), places, (weights, bias), ahead, none, none
    return _moved(Reading(*made), past)


def _moved(known: Reading, past: Together) -> Reading:
    """For these rooms."""
    turns = _turns(known.model.rotary, past.rooms[0].capacity)
    rooms = np.array([(*k, *v, 0) for k, v in map(addresses, past.rooms)], np.int64)
    return known._replace(turns=turns, rooms=rooms)


def _turns(rotary: Any, n: int) -> Array:
    """Of n tokens, or some more, as long as the frequencies are the same; (n, 2, 1, 0) without."""
    if rotary is None:
        return np.empty((n, 2, 1, 0), FLOAT)
    return _table_of(rotary, int(min(1 << (n - 1).bit_length(), rotary.same_until)))


@functools.lru_cache(maxsize=4)  # of texts that begin anew, and of rooms that are made anew
def _table_of(rotary: Any, n: int) -> Array:
    found = layers.rotary(rotary, like=np.empty(0, FLOAT), length=n)
    return np.stack((found.cos, found.sin), axis=1)[:, :, None]


def _grown(known: Reading, past: Together, n: int) -> Together:
    """The past with n columns more, not written yet; in new rooms where there is none left."""
    grown = past.longer(n)
    if grown is not None:
        grown.known = known
        return grown
    more = []
    for own, (groups, *widths) in zip(past, known.plan.heads, strict=True):
        new = (np.empty((known.n_texts, groups, n, width), FLOAT) for width in widths)
        more.append(reserved(*new, past=own))
    moved = Together.of(more)
    if moved is None:
        raise RuntimeError("language_model_extend: new rooms of different lengths")
    moved.known = moved.rooms[0].reading = _moved(known, moved)
    moved.rooms[0].plan = known.plan
    return moved
