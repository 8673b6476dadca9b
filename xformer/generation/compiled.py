"""Texts that grow by calls of `Backend.compiled`: their keys and values stay where they are."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from xformer import tree
from xformer.backends import Backend
from xformer.compiling import bucket
from xformer.generation.prefix import PrefilledPrompt, place_of
from xformer.generation.samplers import Ids, greedy
from xformer.models import EncoderDecoder
from xformer.models.encoder_decoder import EncoderDecoderState
from xformer.typing import Array

LEAST = 256  # columns, so that few texts need other programs
READ = 1 << 30  # bytes of weights, keys and values in one call, at most: some 50 ms
MOST = 64  # tokens of one call
KEPT = 8  # models whose programs are kept
PAYS = 24  # tokens: recording takes as long as 15 to 19 of single ops (Zen 4, two small models)


def compiled_tokens(
    op: str, network: Any, params: Any, most: int, *, asked: bool | None, is_greedy: bool = False
) -> CompiledTokens | None:
    """Calls for tokens of texts of at most `most` tokens; None where they cannot be.

    asked: whether a RuntimeWarning then says why, and prompts are compiled too.
    """
    most, place = min(most, network.context or most), place_of(params)
    why = why_not_compiled(network, place, most)
    if why is None and op == "speculative" and place.graphs:
        why = f"a graph of backend {place.name} reads one token at a time"
    if why is None:
        return CompiledTokens(network, params, place, most, is_greedy, asked=bool(asked))
    if asked:
        warnings.warn(f"{op}: tokens are not compiled: {why}", RuntimeWarning, stacklevel=3)
    return None


def why_not_compiled(network: Any, place: Backend, most: int) -> str | None:
    """Why tokens of texts of at most `most` columns are made call by call; None where they need not
    be."""
    is_pair = isinstance(network, EncoderDecoder)
    if is_pair and place.graphs:
        return "the model is an encoder-decoder"
    if any(
        config.shaw_max_distance is not None
        for config in (network.decoder if is_pair else network.blocks)
    ):
        return "Shaw's relative positions go by the number of keys"
    if most > _steady(network):
        return f"RoPE frequencies change after {network.rotary.max_unscaled_len} tokens"
    if place.compiled(lambda: None, ()) is None:
        return f"backend {place.name} has no such thing"
    return None


def _steady(network: Any) -> float:
    """Tokens for which RoPE frequencies stay the same."""
    rotary = getattr(network, "rotary", None)
    return math.inf if rotary is None else float(rotary.max_unscaled_len)


def width_of(network: Any, prompts: Ids | PrefilledPrompt) -> int:
    """Tokens of the longest text so far; the target of a source begins with one."""
    if isinstance(prompts, PrefilledPrompt):
        return prompts.width
    return 1 if isinstance(network, EncoderDecoder) else max(map(len, prompts))


class CompiledTokens:
    """What `stream` and `speculative` call for further tokens of their texts.

    Keys, values, mask and length are donated, in fixed columns, of which there may be more than
    `most`, the columns of the longest text: other texts then find what is compiled. Where columns
    are full, there are twice as many, and what is compiled is for those. The keys and values of a
    source are read only, in one of few numbers of columns (`bucket`). is_greedy: a call gives the
    likeliest next ids, too.
    """

    def __init__(
        self,
        network: Any,
        params: Any,
        place: Backend,
        most: int,
        is_greedy: bool,
        *,
        asked: bool = False,
    ) -> None:
        self.network, self.params, self.is_greedy, self.place = network, params, is_greedy, place
        self.asked = asked
        limit = min(network.context or math.inf, _steady(network))
        self.limit = most if place.graphs else limit
        call = _compiled.__wrapped__ if place.graphs else _compiled
        self._make = partial(call, network, is_greedy, place)
        self._call: Any = None
        self._source: Any = None  # of an encoder-decoder
        self._state: Any = None
        self._most = 1  # tokens of one call

    def __call__(
        self, text: PrefilledPrompt, new: Sequence[int], most: int = 1
    ) -> tuple[PrefilledPrompt, Array | None]:
        """`text` with `new`, a token of each, without its state, which is here.

        If is_greedy, also the likeliest ids to come after it; and up to most - 1 of them may be in
        the text already, where a library makes several calls at once (`repeated`).
        """
        if self._state is None:
            self.begin(text.state)
        self._require_columns(text.width + 1)
        ids = np.asarray(new, dtype=np.int64)[:, None]
        if self.is_greedy and hasattr(self._call, "repeated"):
            n = min(most, self._most, self._state.capacity - text.width)
            return self._several(text, ids, n)
        self._state, logits, chosen = self._call(self.params, self._source, self._state, ids)
        return PrefilledPrompt(_longer(text, ids), logits[:, -1, :], None, text.width + 1), chosen

    def begin(self, state: Any) -> None:
        """The state of the texts so far, with one column at least."""
        self._source, self._state = _parted(state)

    def close(self) -> None:
        """Let go of the call, which refers to this, and of its memory."""
        self._call = self._source = self._state = None

    def read(self, length: int, ids: Sequence[int], n: int) -> Any:
        """Logits (T, V) after each of the last ids, which follow `length` tokens of one text.

        n: ids of a call, at most; T are those of the last call. Shorter calls are padded to n ids,
        and the padding is rewound, so that all calls have one shape.
        """
        for start in range(0, len(ids), n):
            own = list(ids[start : start + n])
            end = length + start + n
            self._require_columns(int(min(end, self.limit)))
            fits, more = end <= self._state.capacity, n - len(own)
            tokens = np.asarray([own + more * [0] if fits else own], dtype=np.int64)
            if fits:
                self._state, logits, _ = self._call(self.params, self._source, self._state, tokens)
                self.forget(more)
            else:  # at the end of a context
                parts = self.params, self._source, self._state
                logits, self._state = _extended(
                    self.network, self.place, *parts, self.place.asarray(tokens)
                )
        return logits[0, : len(own), :]

    def forget(self, n: int) -> None:
        """The last `n` tokens of the texts."""
        if n:
            self._state = self.network.truncate(self._state, n)

    def _several(self, text: PrefilledPrompt, ids: Any, n: int) -> tuple[PrefilledPrompt, Array]:
        """n tokens more, of which `ids` (B, 1) are the first."""
        given = self._state, np.array(ids), np.zeros((len(ids), MOST), np.int64)
        read = self.params, self._source, given, text.width
        (self._state, _, written), logits = self._call.repeated(n, *read)
        more = np.concatenate([ids, written[:, : n - 1]], axis=1)
        new = PrefilledPrompt(_longer(text, more), logits[:, -1, :], None, text.width + n)
        return new, written[:, n - 1]

    def _require_columns(self, n: int) -> None:
        """At least n columns: where there are fewer, twice as many, and a call anew."""
        if self._call is None or n > self._state.capacity:
            self._open(n)

    def _open(self, n: int) -> None:
        columns = int(min(self.limit, max(LEAST, 2 * n - 2, n)))
        self._state = self._state.preallocate(columns)
        self._call = self._make()
        if self.is_greedy and hasattr(self._call, "repeated"):
            read = tree.nbytes((self.params, self._source, self._state.kv_cache))
            self._most = max(1, min(MOST, READ // read))


def _parted(state: Any) -> tuple[Any, Any]:
    """A state's source, padded to few lengths (None without one), and what each token changes."""
    if not isinstance(state, EncoderDecoderState):
        return None, state
    wide = state.wider(bucket(state.memory[0].k.shape[2]))
    return (wide.memory, wide.src_mask), state._replace(memory=(), src_mask=None)


def _extended(
    network: Any, place: Backend, params: Any, source: Any, state: Any, ids: Array
) -> tuple[Array, Any]:
    """Logits (B, T, V) after each of ids (B, T), and the state, parted as `_parted` does."""
    if source is None:
        logits, state = network.decode(params, ids, state, all_logits=True)
    else:
        state = state._replace(memory=source[0], src_mask=source[1])
        logits, state = network.decode(params, ids, state, all_logits=True)
        state = state._replace(memory=(), src_mask=None)
    return place.upcast(logits), state


def _longer(text: PrefilledPrompt, more: Any) -> tuple[tuple[int, ...], ...]:
    """The ids of each text, and more of each (B, n)."""
    pairs = zip(text.ids, more.tolist(), strict=True)
    return tuple((*old, *row) for old, row in pairs)


@lru_cache(KEPT)
def _compiled(network: Any, is_greedy: bool, place: Backend) -> Any:
    """Some tokens: a function of arrays."""

    def step(params: Any, source: Any, state: Any, ids: Array) -> tuple[Any, Array, Array | None]:
        logits, state = _extended(network, place, params, source, state, ids)
        return state, logits, greedy(logits[:, -1, :]) if is_greedy else None

    def following(params: Any, source: Any, text: Any, first: Any) -> tuple[Any, Array]:
        """One token, and the likeliest one after it in the place of it.

        text: state, ids (B, 1), and those chosen so far (B, MOST), from column `first` on.
        """
        state, ids, written = text
        xp, column = array_namespace(ids), state.length - first
        logits, state = _extended(network, place, params, source, state, ids)
        chosen = greedy(logits[:, -1, :])[:, None]
        written = xp.where(xp.arange(MOST) == column, chosen, written)
        return (state, xp.maximum(chosen, xp.zeros_like(chosen)), written), logits

    made = place.compiled(step, (2,), lends=True)
    if is_greedy and hasattr(made, "repeated"):
        return place.compiled(following, (2,), lends=True)
    return made
