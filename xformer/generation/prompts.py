"""Read prompts by compiled programs, one for each of few lengths (`xformer.compile`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.compiling import Forward, bucket, records
from xformer.layers.attention import KeyValue
from xformer.layers.kv_cache import KVCache
from xformer.layers.rope_by_layer import max_unscaled_len
from xformer.models import EncoderDecoder, LanguageModel
from xformer.models.state import DecodeState

KEPT = 8  # models whose programs are kept


def read_by_program(
    model: Any, params: Any, tokens: Array, mask: Array | None
) -> tuple[Array, DecodeState] | None:
    """Logits (B, V) after `tokens` (B, T), and the state; None if no program can read them.

    mask: (B, T), True = a token, False = padding; None: no padding.

    `LanguageModel.decode` from the initial state gives the same result, up to rounding. A program
    is recorded for each of few lengths (`bucket`). Prompts are padded to one of these lengths on
    the left, and the padding is then removed from the state. Recording takes 1 to 11 times as long
    as a program saves for one prompt (12 to 256 tokens, 0.3 and 11 million parameters). There is no
    program if the RoPE frequencies would change, and for backends and dtypes that `records`
    excludes.
    """
    if not isinstance(model, LanguageModel) or not records(params):
        return None
    size, length = tokens.shape
    columns = min(bucket(length), model.context or bucket(length))
    if columns > max_unscaled_len(model.rotary):
        return None
    xp, n = array_namespace(tokens), columns - length
    padding = xp.zeros((size, n), dtype=tokens.dtype)
    is_token = xp.ones((size, length), dtype=xp.bool) if mask is None else mask
    padded = xp.concat([xp.zeros((size, n), dtype=xp.bool), is_token], axis=1)
    logits, state = _forward(model)(params, xp.concat([padding, tokens], axis=1), padded)
    state = state._replace(mask=padded).padded(length)
    return logits, state._replace(mask=mask)


def encode_by_program(
    model: EncoderDecoder, params: Any, sources: Array, mask: Array | None
) -> DecodeState | None:
    """The state of `EncoderDecoder.init_state` for sources (B, S), by a compiled program.

    mask: (B, S), True = a token, False = padding; None: no padding

    A program is recorded for each of few lengths (`bucket`). Sources are padded on the right to one
    of these lengths, and the padding is then removed from the state.

    None, without encoding, in three cases:
    - The encoder has no embedding.
    - `records` excludes the backend or the dtype of params.
    - Sources are longer than src_embed allows. `init_state` then raises the error.
    """
    if model.src_embed is None or not records(params):
        return None
    size, length = sources.shape
    n_slots = min(bucket(length), model.src_embed.context or bucket(length))
    if n_slots < length:  # `init_state` says so
        return None
    xp, n = array_namespace(sources), n_slots - length
    padding = xp.zeros((size, n), dtype=sources.dtype)
    is_token = xp.ones((size, length), dtype=xp.bool) if mask is None else mask
    padded = xp.concat([is_token, xp.zeros((size, n), dtype=xp.bool)], axis=1)
    encoded = _encoder(model)(params, xp.concat([sources, padding], axis=1), padded)
    memory = tuple(KeyValue(*(a[:, :, :length, :] for a in kv)) for kv in encoded)
    n_layers = len(model.decoder)
    if model.shared_memory:
        memory *= n_layers
    return DecodeState((KVCache(),) * n_layers, memory=memory, src_mask=mask)


@lru_cache(KEPT)
def _encoder(model: EncoderDecoder) -> Forward:
    """The compiled programs of an encoder, one for each length."""

    def read(params: Any, sources: Array, mask: Array) -> tuple[KeyValue, ...]:
        memory = model.init_state(params, sources, src_mask=mask).memory
        return memory[:1] if model.shared_memory else memory

    return Forward(read)


@lru_cache(KEPT)
def _forward(model: LanguageModel) -> Forward:
    """The compiled programs of a model, one for each length."""

    def read(params: Any, tokens: Array, mask: Array) -> tuple[Array, DecodeState]:
        logits, state = model.decode(params, tokens, model.init_state(), mask=mask)
        return logits, state._replace(mask=None)  # an input must not be a result

    return Forward(read)
