"""Compiled decoding: each step is one call of `Backend.compiled` on a static KV cache."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from xformer.backends import Backend
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.compiling import bucket, records
from xformer.generation.prefix import PrefilledPrompt, backend_of_params, width_of
from xformer.generation.samplers import Ids
from xformer.layers.recurrent_state import is_recurrent
from xformer.layers.rope_by_layer import max_unscaled_len
from xformer.models import EncoderDecoder
from xformer.ops.greedy import greedy

LEAST = 256  # least slots of a KV cache, so that most texts use the same program
# Most bytes of weights, keys and values that one call reads, by `Backend.graphs`. That is about
# 50 ms of a CPU, and of a GPU, which reads 100 times as fast.
READ = {False: 1 << 30, True: 100 << 30}
MOST = 64  # most tokens of one call
KEPT = 8  # models whose programs are kept
# Recording a program takes as long as 15 to 19 uncompiled tokens (Zen 4, two small models).
PAYS = 24  # least new tokens for which `stream` compiles unless it is asked


def compiled_tokens(
    op: str,
    model: Any,
    params: Any,
    prompts: Ids | PrefilledPrompt,
    max_new_tokens: int,
    *,
    compiled: bool | None,
    is_greedy: bool = False,
) -> CompiledTokens | None:
    """The compiled decoding of prompts; None if it is not asked for, or not possible.

    compiled: of `stream`. True: warn with a RuntimeWarning if it is not possible, and compile
        prompts too.
    is_greedy: also compute the next ids of greedy decoding.
    """
    if not (max_new_tokens >= PAYS and records(params) if compiled is None else compiled):
        return None
    # The last token is not decoded, so it needs no slot.
    most = width_of(model, prompts) + max(max_new_tokens - 1, 0)
    most, backend = min(most, model.context or most), backend_of_params(params)
    why = why_not_compiled(model, backend, most)
    if why is None and op == "speculative" and backend.graphs:
        why = f"a graph of backend {backend.name} reads one token at a time"
    if why is None:
        return CompiledTokens(model, params, backend, most, is_greedy, asked=bool(compiled))
    if compiled:
        warnings.warn(f"{op}: tokens are not compiled: {why}", RuntimeWarning, stacklevel=3)
    return None


def why_not_compiled(model: Any, backend: Backend, most: int) -> str | None:
    """The reason why the decoding step of `model` cannot be compiled; None if it can.

    backend: of the parameters
    most: the tokens of the longest text, with its prompt
    """
    is_pair = isinstance(model, EncoderDecoder)
    if is_pair and backend.graphs:
        return "the model is an encoder-decoder"
    configs = model.decoder if is_pair else model.blocks
    if any(config.attn.shaw_max_distance is not None for config in configs):
        return "Shaw's relative positions depend on the number of keys"
    if any(config.attn.xl for config in configs):
        return "Transformer-XL's relative positions depend on the number of keys"
    if any(map(is_recurrent, configs)):
        return "the state of a gated DeltaNet cannot drop tokens"
    if most > _max_unscaled_len(model):
        return f"RoPE frequencies change after {_max_unscaled_len(model)} tokens"
    if backend.compiled(lambda: None, ()) is None:
        return f"backend {backend.name} compiles nothing"
    return None


def _max_unscaled_len(model: Any) -> float:
    """The most tokens with unchanged RoPE frequencies; inf if they never change."""
    return max_unscaled_len(getattr(model, "rotary", None))


class CompiledTokens:
    """Decodes a batch of texts by a compiled step, for `stream` and `speculative`.

    The KV cache is preallocated, and a step may overwrite the cache that it gets. The cache may
    have more slots than `most`, the length of the longest text in tokens, so that other texts can
    use the same program. A full cache is replaced by one with twice the slots, and the step is
    compiled again. The keys and values of an encoder-decoder's source never change. They are
    padded to one of a few lengths (`bucket`).

    is_greedy: a step also returns the next ids of greedy decoding.
    asked: True if the user asked for compilation. Prompts are compiled too.
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        backend: Backend,
        most: int,
        is_greedy: bool,
        *,
        asked: bool = False,
    ) -> None:
        self.model, self.params, self.backend = model, params, backend
        self.is_greedy, self.asked = is_greedy, asked
        limit = min(model.context or math.inf, _max_unscaled_len(model))
        self.limit = most if backend.graphs else limit
        call = _compiled.__wrapped__ if backend.graphs else _compiled
        self._make = partial(call, model, is_greedy, backend)
        self._call: Any = None
        self._source: Any = None  # keys, values and mask of an encoder-decoder's source
        self._state: Any = None
        self._most = 1  # tokens of one call

    def __call__(
        self, text: PrefilledPrompt, new: Sequence[int], most: int = 1
    ) -> tuple[PrefilledPrompt, np.ndarray | None]:
        """The text after `new`, one token a sequence, and the next greedy ids (B,) if is_greedy.

        The returned text has no state: this object holds it. The ids are on the host. most: if
        is_greedy and the library can repeat a call (`repeated`), up to most - 1 further greedy ids
        are decoded and appended.
        """
        if self._state is None:
            self.begin(text.state)
        self._require_slots(text.width + 1)
        ids = np.asarray(new, dtype=np.int64)[:, None]
        if self.is_greedy and hasattr(self._call, "repeated"):
            n = min(most, self._most, self._state.capacity - text.width)
            return self._several(text, ids, n)
        self._state, logits, chosen = self._call(self.params, self._source, self._state, ids)
        longer = PrefilledPrompt(_longer(text, ids), logits[:, -1, :], None, text.width + 1)
        return longer, None if chosen is None else self.backend.to_numpy(chosen)

    def begin(self, state: Any) -> None:
        """Start from the state of texts of at least one token."""
        self._source, self._state = _parted(state)

    def close(self) -> None:
        """Free the compiled call and its memory."""
        self._call = self._source = self._state = None

    def read(self, length: int, ids: Sequence[int], n: int) -> Any:
        """Decode `ids`, which follow `length` tokens of one text; logits (T, V) of the last call.

        n: ids of a call. The last call is padded to n ids, and the padding is then truncated, so
        that all calls have the same shape. T: ids of the last call without padding.
        """
        for start in range(0, len(ids), n):
            part = list(ids[start : start + n])
            end = length + start + n
            self._require_slots(int(min(end, self.limit)))
            fits, more = end <= self._state.capacity, n - len(part)
            tokens = np.asarray([part + more * [0] if fits else part], dtype=np.int64)
            if fits:
                self._state, logits, _ = self._call(self.params, self._source, self._state, tokens)
                self.forget(more)
            else:  # near the end of the context there are no slots for padding
                parts = self.params, self._source, self._state
                logits, self._state = _extended(
                    self.model, self.backend, *parts, self.backend.asarray(tokens)
                )
        return logits[0, : len(part), :]

    def forget(self, n: int) -> None:
        """Remove the last `n` tokens of the texts."""
        if n:
            self._state = self.model.truncate(self._state, n)

    def _several(
        self, text: PrefilledPrompt, ids: Any, n: int
    ) -> tuple[PrefilledPrompt, np.ndarray]:
        """Decode `ids` (B, 1) and n - 1 further greedy ids in one call. Read them at its end."""
        hosts = np.array(ids), np.zeros((len(ids), MOST), np.int64)
        donated = self._state, *map(self.backend.asarray, hosts)
        args = self.params, self._source, donated, text.width
        (self._state, _, chosen), logits = self._call.repeated(n, *args)
        written = self.backend.to_numpy(chosen)
        more = np.concatenate([ids, written[:, : n - 1]], axis=1)
        new = PrefilledPrompt(_longer(text, more), logits[:, -1, :], None, text.width + n)
        return new, written[:, n - 1]

    def _require_slots(self, n: int) -> None:
        """Make sure that the KV cache has n slots and that there is a compiled call.

        If not, preallocate about 2n slots, at least `LEAST` and at most `limit`, and compile. For
        n > limit the KV cache gets `limit` slots, too few: callers ask for at most `limit`.
        ValueError if the state has more than `limit` tokens.
        """
        if self._call is None or n > self._state.capacity:
            self._open(n)

    def _open(self, n: int) -> None:
        columns = int(min(self.limit, max(LEAST, 2 * n - 2, n)))
        self._state = self._state.preallocate(columns)
        self._call = self._make()
        if self.is_greedy and hasattr(self._call, "repeated"):
            read = tree.nbytes((self.params, self._source, self._state.kv_cache))
            self._most = max(1, min(MOST, READ[self.backend.graphs] // read))


def _parted(state: Any) -> tuple[Any, Any]:
    """The state in two parts: the source, which decoding only reads, and what each token changes.

    The source is padded to few lengths; it is None for a language model.
    """
    if not state.memory:
        return None, state
    wide = state.wider(bucket(state.memory[0].k.shape[2]))
    return (wide.memory, wide.src_mask), state._replace(memory=(), src_mask=None)


def _extended(
    model: Any, backend: Backend, params: Any, source: Any, state: Any, ids: Array
) -> tuple[Array, Any]:
    """Logits (B, T, V) after each of ids (B, T), and the new state without its source."""
    if source is None:
        logits, state = model.decode(params, ids, state, all_logits=True)
    else:
        state = state._replace(memory=source[0], src_mask=source[1])
        logits, state = model.decode(params, ids, state, all_logits=True)
        state = state._replace(memory=(), src_mask=None)
    return backend.upcast(logits), state


def _longer(text: PrefilledPrompt, more: Any) -> tuple[tuple[int, ...], ...]:
    """The ids of each text, followed by `more` (B, n)."""
    pairs = zip(text.ids, more.tolist(), strict=True)
    return tuple((*old, *row) for old, row in pairs)


@lru_cache(KEPT)
def _compiled(model: Any, is_greedy: bool, backend: Backend) -> Any:
    """The compiled decoding step. Greedy decoding may get one that can be `repeated`."""

    def step(params: Any, source: Any, state: Any, ids: Array) -> tuple[Any, Array, Array | None]:
        logits, state = _extended(model, backend, params, source, state, ids)
        return state, logits, greedy(logits[:, -1, :]) if is_greedy else None

    def following(params: Any, source: Any, text: Any, first: Any) -> tuple[Any, Array]:
        """Decode one token, and return the next greedy id as the input of the following step.

        text: the state, ids (B, 1), and the greedy ids so far (B, MOST). first: the length of the
        state at column 0 of these.
        """
        state, ids, written = text
        xp, column = array_namespace(ids), state.length - first
        logits, state = _extended(model, backend, params, source, state, ids)
        chosen = greedy(logits[:, -1, :])[:, None]
        written = xp.where(xp.arange(MOST) == column, chosen, written)
        return (state, xp.maximum(chosen, xp.zeros_like(chosen)), written), logits

    compiled = backend.compiled(step, (2,), lends=True)
    if is_greedy and hasattr(compiled, "repeated"):
        return backend.compiled(following, (2,), lends=True)
    return compiled
