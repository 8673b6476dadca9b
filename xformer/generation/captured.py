"""Texts that grow by calls of `Backend.captured`: their keys and values stay where they are."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer import tree
from xformer.backends import Backend
from xformer.generation.prefix import Prefix
from xformer.generation.samplers import likeliest
from xformer.models import EncoderDecoder
from xformer.typing import Array

LEAST = 64  # columns


class CapturedTokens:
    """What `stream` calls for each token more of its texts.

    Keys, values, mask and length are the state of the call, in fixed columns; the ids of the last
    tokens its input, the logits of the next ones its results. Where the columns are full, there are
    twice as many in the state of a new call.
    """

    @classmethod
    def of(
        cls, network: Any, params: Any, place: Backend, most: int, greedy: bool
    ) -> CapturedTokens | None:
        """For texts of at most `most` columns. None, and a RuntimeWarning, where tokens are to be
        made as ever."""
        why = None
        if isinstance(network, EncoderDecoder):
            why = "the model is an encoder-decoder"
        elif any(config.shaw is not None for config in network.blocks):
            why = "Shaw's relative positions go by the number of keys"
        elif network.rotary is not None and most > network.rotary.same_until:
            why = f"RoPE frequencies change after {network.rotary.same_until} tokens"
        else:
            tokens = cls(network, params, place, most, greedy)
            if place.captured(tokens._step) is not None:
                return tokens
            why = f"backend {place.name} has no such thing"
        warnings.warn(f"generate: tokens are not captured: {why}", RuntimeWarning, stacklevel=4)
        return None

    def __init__(self, network: Any, params: Any, place: Backend, most: int, greedy: bool) -> None:
        self.network, self.params, self.place = network, params, place
        self.most, self.greedy = most, greedy
        self._call: Any = None
        self._like: Any = None  # the state that the arrays of the call are
        self._arrays: dict[str, Array] = {}

    def __call__(self, text: Prefix, new: Sequence[int]) -> tuple[Prefix, Array | None]:
        """`text` and one token more of each, without its state, which is here; where greedy, the
        likeliest ids to come after it."""
        if self._call is None or text.width == self._like.columns:
            self._open(text)
        inputs = {"ids": np.asarray(new, dtype=np.int64)}
        self._arrays, (logits, chosen) = self._call(self._arrays, inputs)
        ids = tuple((*old, i) for old, i in zip(text.ids, new, strict=True))
        return Prefix(ids, logits, None, text.width + 1), chosen

    def close(self) -> None:
        """Let go of the call, which refers to this, and of its memory."""
        self._call, self._arrays = None, {}

    def _open(self, text: Prefix) -> None:
        """A call anew, in more columns."""
        state = text.state
        if self._call is not None:
            state = tree.unflatten(self._like, self._arrays)
        self._like = state.in_columns(min(self.most, max(LEAST, 2 * text.width)))
        self._arrays = tree.flatten(self._like)
        self._call = self.place.captured(self._step)

    def _step(self, arrays: dict[str, Array], inputs: Any) -> tuple[dict[str, Array], Any]:
        """One token: a function of arrays."""
        state = tree.unflatten(self._like, arrays)
        logits, state = self.network.extend(self.params, inputs["ids"][:, None], state)
        logits = self.place.widened(logits)
        return tree.flatten(state), (logits, likeliest(logits) if self.greedy else None)
