"""What `LanguageModel.decode` does after its checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import as_indices
from xformer.layers.advance import advance
from xformer.layers.kv_cache import require_rows
from xformer.layers.protocol import Context, SideInputs
from xformer.layers.rope_by_layer import frequency_length, max_unscaled_len, tables_of
from xformer.models.state import DecodeState, appended_mask, position_ids

if TYPE_CHECKING:
    from xformer.models.language_model import LanguageModel, LanguageModelParams


def decode(
    model: LanguageModel,
    params: LanguageModelParams,
    tokens: Array,
    state: DecodeState,
    mask: Array | None,
    *,
    all_logits: bool,
) -> tuple[Array, DecodeState]:
    """`decode` without its checks, with the RoPE frequencies of the state."""
    first: Any = state.memory[0].k if state.memory else state.kv_cache[0].k
    if first is not None:
        require_rows(tokens, first.shape[0])
    n_keys = state.capacity if state.is_static else state.length + tokens.shape[1]
    new_mask, key_mask, positions = _masks(model, tokens, state, mask)
    embed_positions = None if state.mask is None and mask is None else positions
    (x, pos), _ = model._embedded(params, tokens, embed_positions, start=state.length)
    length = state.rope_length or 0
    rotary = tables_of(model.rotary, like=x, length=length, positions=positions)
    kv_cache = state.static_kv_cache() if state.is_static else state.kv_cache
    if model.memory_len is not None and not state.is_static:
        kv_cache = tuple(layer.last(model.memory_len) for layer in kv_cache)
    memory_mask = None if state.src_mask is None else state.src_mask[:, None, None, :]
    bias = model._alibi(x, x.shape[1], n_keys, state.write_index)
    x, kv_cache = advance(
        x,
        params.stack,
        SideInputs(state.memory or None, bias, pos),
        configs=model.blocks,
        context=Context(key_mask, memory_mask=memory_mask, rotary=rotary, kv_cache=kv_cache),
        n_cached=state.length,
        relative_bias=model.relative_bias,
    )
    x = x if all_logits else x[:, -1:, :]
    logits, _ = model.head.forward(x, params.head, params.embed.table)  # type: ignore[union-attr]
    new_state = state.appended(kv_cache, new_mask, tokens)
    return logits if all_logits else logits[:, 0, :], new_state


def longest(model: LanguageModel, tokens: Array, mask: Array | None, state: DecodeState) -> int:
    """The length of the longest text with `tokens`, without padding.

    Or an upper bound of it, if that has the same RoPE frequencies.
    """
    length: int = state.length + tokens.shape[1]
    new_mask = appended_mask(state.mask, mask, tokens, state.length)
    if new_mask is None or length <= max_unscaled_len(model.rotary):
        return length
    return int(array_namespace(new_mask).max(position_ids(new_mask))) + 1


def rotated_for(
    model: LanguageModel, length: int, params: LanguageModelParams, state: DecodeState
) -> DecodeState:
    """`state` with the RoPE frequencies of `length`. If they changed, the text is read again.

    Rotating the keys anew is not enough: after the first layer, keys depend on hidden states
    that were computed with the old frequencies.
    """
    rope_length = frequency_length(model.rotary, length)
    if rope_length == state.rope_length:
        return state
    empty = model.init_state()._replace(rope_length=rope_length)
    if state.length == 0:
        return empty
    return decode(model, params, state.ids, empty, state.mask, all_logits=False)[1]


def _masks(
    model: LanguageModel, tokens: Array, state: DecodeState, mask: Array | None
) -> tuple[Array | None, Array | None, Array | None]:
    """The new mask of the state, the mask of attention, and the position ids of `tokens`.

    The masks are None without padding; attention is then only causal. The ids are None if nothing
    reads them.
    """
    if not state.is_static:
        new_mask = appended_mask(state.mask, mask, tokens, state.length)
        key_mask = None if new_mask is None else new_mask[:, None, None, :]
        if model.rotary is None and new_mask is None:
            return None, None, None  # the embedding counts from the state's length
        return new_mask, key_mask, _position_ids(tokens, new_mask, state.length)
    if mask is not None:
        raise ValueError("decode: a static state has a mask already, got another")
    n = tokens.shape[1]
    return state.mask, state.key_mask(n)[:, None, :, :], state.position_ids(n)


def _position_ids(tokens: Array, mask: Array | None, n_cached: int) -> Array:
    """Position ids of `tokens` (B, T), which follow `n_cached` slots. mask: of all slots."""
    if mask is not None:
        return position_ids(mask)[:, n_cached:]
    xp = array_namespace(tokens)
    dtype = as_indices(tokens).dtype
    return xp.arange(n_cached, n_cached + tokens.shape[1], dtype=dtype, device=device(tokens))
