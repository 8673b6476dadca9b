"""What `extend` knows of a model, and of where its keys and values are: made once of a text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.append import reserved
from xformer.backends.numba.advance import FLOAT, addresses
from xformer.backends.numba.known import Pin
from xformer.backends.numba.linear import place_of
from xformer.backends.numba.plan import Plan, Unfit, map_of, pins_of, planned, require
from xformer.backends.numba.together import Together

from xformer import layers
from xformer.layers.linear import LinearParams
from xformer.layers.past import Past
from xformer.models import LMHead
from xformer.models.language_model import LanguageModel, LanguageModelParams
from xformer.tree import value
from xformer.typing import Array

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
    weights: int  # bytes of them
    turns: Array  # (S, 2, 1, R/2), cosines and sines of all tokens that there is room for
    rooms: Array  # (L, 7), as `layer` has a past
    pins: Sequence[Pin]  # which keep arrays of `params` where they are


def reading_of(
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
        return moved(kept, together), together
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
    n_bytes = 4 * (plan.weights + width * size)
    none = np.empty(0, FLOAT)
    made = (
        model,
        params,
        plan,
        n_texts,
        place_of(table),
        places,
        (weights, bias),
        n_bytes,
        none,
        none,
        pins_of(params),
    )
    return moved(Reading(*made), past)


def moved(known: Reading, past: Together) -> Reading:
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


def grown(known: Reading, past: Together, n: int) -> Together:
    """The past with n columns more, not written yet; in new rooms where there is none left."""
    longer = past.longer(n)
    if longer is not None:
        longer.known = known
        return longer
    more = []
    for own, (groups, *widths) in zip(past, known.plan.heads, strict=True):
        new = (np.empty((known.n_texts, groups, n, width), FLOAT) for width in widths)
        more.append(reserved(*new, past=own))
    rooms = Together.of(more)
    if rooms is None:
        raise RuntimeError("extend: new rooms of different lengths")
    rooms.known = rooms.rooms[0].reading = moved(known, rooms)
    rooms.rooms[0].plan = known.plan
    return rooms
