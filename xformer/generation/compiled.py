"""Texts that grow by calls of `Backend.compiled`: their keys and values stay where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from xformer import tree
from xformer.backends import Backend
from xformer.generation.prefix import Prefix
from xformer.generation.samplers import likeliest
from xformer.models import EncoderDecoder
from xformer.typing import Array

LEAST = 256  # columns, so that few texts need other programs
READ = 1 << 30  # bytes of weights, keys and values in one call, at most: some 50 ms
MOST = 64  # tokens of one call
KEPT = 8  # models whose programs are kept


def why_not_compiled(network: Any, place: Backend, most: int) -> str | None:
    """Why tokens of texts of at most `most` columns are made call by call; None where they need not
    be."""
    if isinstance(network, EncoderDecoder):
        return "the model is an encoder-decoder"
    if any(config.shaw is not None for config in network.blocks):
        return "Shaw's relative positions go by the number of keys"
    if network.rotary is not None and most > network.rotary.same_until:
        return f"RoPE frequencies change after {network.rotary.same_until} tokens"
    if place.compiled(lambda: None, ()) is None:
        return f"backend {place.name} has no such thing"
    return None


class CompiledTokens:
    """What `stream` calls for further tokens of its texts.

    Keys, values, mask and length are donated, in fixed columns, of which there may be more than
    `most`, the columns of the longest text: other texts then find what is compiled. Where columns
    are full, there are twice as many, and what is compiled is for those.
    """

    def __init__(self, network: Any, params: Any, place: Backend, most: int, greedy: bool) -> None:
        self.params, self.greedy, limit = params, greedy, network.context or math.inf
        if network.rotary is not None:
            limit = min(limit, network.rotary.same_until)
        self.limit = most if place.graphs else limit
        call = _compiled.__wrapped__ if place.graphs else _compiled
        self._make = partial(call, network, greedy, place)
        self._call: Any = None
        self._state: Any = None
        self._most = 1  # tokens of one call

    def __call__(
        self, text: Prefix, new: Sequence[int], most: int = 1
    ) -> tuple[Prefix, Array | None]:
        """`text` with `new`, a token of each, without its state, which is here.

        Where greedy, also the likeliest ids to come after it; and up to most - 1 of them may be in
        the text already, where a library makes several calls at once (`repeated`).
        """
        if self._call is None or text.width == self._state.columns:
            self._open(text)
        ids = np.asarray(new, dtype=np.int64)[:, None]
        if self.greedy and hasattr(self._call, "repeated"):
            n = min(most, self._most, self._state.columns - text.width)
            return self._several(text, ids, n)
        self._state, logits, chosen = self._call(self.params, self._state, ids)
        return Prefix(_longer(text, ids), logits, None, text.width + 1), chosen

    def close(self) -> None:
        """Let go of the call, which refers to this, and of its memory."""
        self._call = self._state = None

    def _several(self, text: Prefix, ids: Any, n: int) -> tuple[Prefix, Array]:
        """n tokens more, of which `ids` (B, 1) are the first."""
        given = self._state, np.array(ids), np.zeros((len(ids), MOST), np.int64)
        (self._state, _, written), logits = self._call.repeated(n, self.params, given, text.width)
        more = np.concatenate([ids, written[:, : n - 1]], axis=1)
        return Prefix(_longer(text, more), logits, None, text.width + n), written[:, n - 1]

    def _open(self, text: Prefix) -> None:
        """A call anew, in more columns."""
        state = text.state if self._state is None else self._state
        self._state = state.in_columns(int(min(self.limit, max(LEAST, 2 * text.width))))
        self._call = self._make()
        self._most = max(1, min(MOST, READ // tree.nbytes((self.params, self._state.past))))


def _longer(text: Prefix, more: Any) -> tuple[tuple[int, ...], ...]:
    """The ids of each text, and more of each (B, n)."""
    pairs = zip(text.ids, more.tolist(), strict=True)
    return tuple((*old, *row) for old, row in pairs)


@lru_cache(KEPT)
def _compiled(network: Any, greedy: bool, place: Backend) -> Any:
    """One token: a function of arrays."""

    def step(params: Any, state: Any, ids: Array) -> tuple[Any, Array, Array | None]:
        logits, state = network.extend(params, ids, state)
        logits = place.widened(logits)
        return state, logits, likeliest(logits) if greedy else None

    def following(params: Any, text: Any, first: Any) -> tuple[Any, Array]:
        """One token, and the likeliest one after it in the place of it.

        text: state, ids (B, 1), and those chosen so far (B, MOST), from column `first` on.
        """
        state, ids, written = text
        xp, column = array_namespace(ids), state.length - first
        logits, state = network.extend(params, ids, state)
        logits = place.widened(logits)
        chosen = likeliest(logits)[:, None]
        written = xp.where(xp.arange(MOST) == column, chosen, written)
        return (state, xp.maximum(chosen, xp.zeros_like(chosen)), written), logits

    made = place.compiled(step, (1,), lends=True)
    if greedy and hasattr(made, "repeated"):
        return place.compiled(following, (1,), lends=True)
    return made
