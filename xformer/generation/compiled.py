"""Texts that grow by calls of `Backend.compiled`: their keys and values stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from xformer.backends import Backend
from xformer.generation.prefix import Prefix
from xformer.generation.samplers import likeliest
from xformer.models import EncoderDecoder
from xformer.typing import Array

LEAST = 64  # columns
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
    """What `stream` calls for each token more of its texts.

    Keys, values, mask and length are donated, in fixed columns. Where the columns are full, there
    are twice as many, and what is compiled is for those.
    """

    def __init__(self, network: Any, params: Any, place: Backend, most: int, greedy: bool) -> None:
        self.params, self.most = params, most
        call = _compiled.__wrapped__ if place.graphs else _compiled
        self._make = partial(call, network, greedy, place)
        self._call: Any = None
        self._state: Any = None

    def __call__(self, text: Prefix, new: Sequence[int]) -> tuple[Prefix, Array | None]:
        """`text` and one token more of each, without its state, which is here; where greedy, the
        likeliest ids to come after it."""
        if self._call is None or text.width == self._state.columns:
            self._open(text)
        ids = np.asarray(new, dtype=np.int64)[:, None]
        self._state, logits, chosen = self._call(self.params, self._state, ids)
        longer = tuple((*old, i) for old, i in zip(text.ids, new, strict=True))
        return Prefix(longer, logits, None, text.width + 1), chosen

    def close(self) -> None:
        """Let go of the call, which refers to this, and of its memory."""
        self._call = self._state = None

    def _open(self, text: Prefix) -> None:
        """A call anew, in more columns."""
        state = text.state if self._state is None else self._state
        self._state = state.in_columns(min(self.most, max(LEAST, 2 * text.width)))
        self._call = self._make()


@lru_cache(KEPT)
def _compiled(network: Any, greedy: bool, place: Backend) -> Any:
    """One token: a function of arrays."""

    def step(params: Any, state: Any, ids: Array) -> tuple[Any, Array, Array | None]:
        logits, state = network.extend(params, ids, state)
        logits = place.widened(logits)
        return state, logits, likeliest(logits) if greedy else None

    return place.compiled(step, (1,), lends=True)
