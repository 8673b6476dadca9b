"""Prefilled prompts: texts that a model has read, with the state to continue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from xformer import backends
from xformer.backends import Backend
from xformer.base import tree
from xformer.base.typing import Array
from xformer.dispatch.checks import require_id, require_ids, require_sizes, whole
from xformer.dispatch.subclasses import refusal
from xformer.generation.prompts import encode_by_program, read_by_program
from xformer.generation.samplers import Ids
from xformer.generation.settings import start_of
from xformer.layers.recurrent_state import is_recurrent
from xformer.models import EncoderDecoder, LanguageModel, LMHead
from xformer.models.describe import in_words

COLUMNS = 64  # on libraries that compile for every shape, a state's length is a multiple of this


class PrefilledPrompt(NamedTuple):
    """A batch of B texts that `prefill` has read, with the model's state after them.

    It is immutable, so generation can continue it many times.
    """

    # The token ids of each text, without padding. An encoder-decoder: of targets, not of sources.
    ids: tuple[tuple[int, ...], ...]
    logits: Array  # (B, V), for the token after each text
    state: Any  # the model's decoding state after the texts
    width: int  # the tokens that the model has read for each text, including padding

    def rows(self, rows: Sequence[int]) -> PrefilledPrompt:
        """The texts `rows`, in this order; a text may be repeated."""
        backend = beside(self.logits)
        ids = tuple(self.ids[i] for i in rows)
        with backend.active():
            taken = backend.asarray(np.asarray(rows, dtype=np.int64))
            logits = backend.xp.take(self.logits, taken, axis=0)
            return PrefilledPrompt(ids, logits, self.state.rows(taken), self.width)


def prefill(
    model: Any,
    params: Any,
    prompts: Ids,
    *,
    after: PrefilledPrompt | None = None,
    start_id: int | None = None,
    chunk: int | None = None,
    compiled: bool = False,
) -> PrefilledPrompt:
    """Read prompts, so that they can be continued.

    prompts: a list of token ids each, of any lengths; shorter ones are padded on the left. For an
        encoder-decoder they are the sources.
    after: the prefix that the prompts continue, one text each or one for all. It is read again if
        the longer texts have other RoPE frequencies.
    start_id: the id that the targets of an encoder-decoder begin with; None: as the model's
        configuration says.
    chunk: read this many tokens of the prompts at a time: the same result in less memory.
    compiled: read prompts and sources by compiled programs if numba's kernels run (`prompts`).
        The result is the same up to rounding. A program is recorded for each of few lengths, which
        pays if several prompts have such a length.

    ValueError for a prompt without tokens, ids outside the vocabulary, more tokens than the context
    holds, and after or chunk for a model with memory_len. TypeError if prompts or after have
    another type.
    """
    require_writer("prefill", model)
    rows = checked(prompts)
    if chunk is not None:
        (chunk,) = require_sizes("prefill", 1, chunk=chunk)
    if chunk is not None or after is not None:
        require_no_memory("prefill in pieces", model)
    if after is not None and not isinstance(after, PrefilledPrompt):
        raise TypeError(f"prefill: after must be a PrefilledPrompt, got {type(after).__name__}")
    backend = backend_of_params(params)
    with backend.active():
        if after is None:
            state, rows = opened(model, params, rows, backend, start_id, compiled=compiled)
            before: Ids = ((),) * len(rows)
            width = 0
        else:
            embed = model.target_embed if isinstance(model, EncoderDecoder) else model.embed
            _require_prompt_ids(rows, embed)
            before, _, state, width = _aligned(after, rows, model)
        tokens, mask = _padded(rows, backend)
        length = tokens.shape[1]
        _require_room("prefill", model, width + length)
        ids = tuple((*old, *new) for old, new in zip(before, rows, strict=True))
        more: dict[str, Any] = {}
        if isinstance(model, LanguageModel):
            more["length"] = max(map(len, ids))
        step, result = chunk or length, None
        if compiled and after is None and step >= length:
            result = read_by_program(model, params, tokens, mask)
        for start in range(0, length, step) if result is None else ():
            part = slice(start, start + step)
            if mask is not None:
                more["mask"] = mask[:, part]
            logits, state = model.decode(params, tokens[:, part], state, **more)
        if result is not None:
            logits, state = result
        return PrefilledPrompt(ids, backend.upcast(logits), state, width + length)


def opened(
    model: Any,
    params: Any,
    prompts: Ids,
    backend: Backend,
    start_id: int | None = None,
    *,
    compiled: bool = False,
) -> tuple[Any, Ids]:
    """The state before any token, and the tokens to read.

    These are the prompts; for an encoder-decoder, the start token of each target. compiled: encode
    sources by a compiled program (`prompts.encode_by_program`).
    """
    if not isinstance(model, EncoderDecoder):
        _require_prompt_ids(prompts, model.embed)
        return model.init_state(), prompts
    _require_prompt_ids(prompts, model.src_embed)
    sources, mask = _padded(prompts, backend, left=False)
    if model.pad_id is not None:  # a source is read alike, alone and beside longer ones
        own = sources != model.pad_id
        mask = own if mask is None else mask & own
    state = encode_by_program(model, params, sources, mask) if compiled else None
    if state is None:
        state = model.init_state(params, sources, src_mask=mask)
    return state, ((_start_id(model, start_id),),) * len(prompts)


def extended(
    model: Any,
    params: Any,
    prefix: PrefilledPrompt,
    new: Sequence[int],
    backend: Backend,
) -> PrefilledPrompt:
    """`prefix` after one more token of each text. backend: of its arrays."""
    tokens = backend.asarray(np.asarray(new, dtype=np.int64)[:, None])
    state, width = prefix.state, prefix.width
    if backend.compiles and isinstance(model, LanguageModel):
        length = width + COLUMNS - width % COLUMNS
        state = state.padded(min(length, model.context or length) - 1)
    ids = tuple((*old, i) for old, i in zip(prefix.ids, new, strict=True))
    logits, state = model.decode(params, tokens, state)
    return PrefilledPrompt(ids, backend.upcast(logits), state, width + 1)


def require_writer(op: str, model: Any) -> None:
    """ValueError unless the model can generate text."""
    writes = isinstance(model, EncoderDecoder) and model.head is not None
    if isinstance(model, LanguageModel):
        writes = model.causal and isinstance(model.head, LMHead)
    if not writes:
        raise ValueError(
            f"{op}: the model must be a causal language model or an encoder-decoder, with a head "
            f"over its vocabulary, got {in_words(model)}"
        )


def require_no_memory(op: str, model: Any) -> None:
    """ValueError for a model with memory_len, whose logits depend on where a piece ends."""
    if getattr(model, "memory_len", None) is not None:
        raise ValueError(
            f"{op}: a model with memory_len must read a text in one piece, got memory_len = "
            f"{model.memory_len}"
        )


def backend_of_params(params: Any) -> Backend:
    """The backend and the device of `params`."""
    leaves = list(tree.flatten(params).values())
    if not leaves:
        raise TypeError(f"params must be the model's parameters, got {params!r:.60}")
    return beside(tree.value(leaves[0]))


def beside(array: Array) -> Backend:
    """The backend of `array`, with the device of `array` as its device."""
    return replace(backends.backend_of(array), device=device(array))


def fitting(
    op: str, model: Any, prompts: Ids | PrefilledPrompt, max_new_tokens: int
) -> Ids | PrefilledPrompt:
    """The checked prompts. ValueError if they and max_new_tokens do not fit the context."""
    prompts = prompts if isinstance(prompts, PrefilledPrompt) else checked(prompts)
    # The last new token is not decoded, so it needs no position.
    _require_room(op, model, width_of(model, prompts), max(max_new_tokens - 1, 0))
    return prompts


def width_of(model: Any, prompts: Ids | PrefilledPrompt) -> int:
    """The number of tokens of the longest prompt; 1, the start token, for an encoder-decoder."""
    if isinstance(prompts, PrefilledPrompt):
        return prompts.width
    return 1 if isinstance(model, EncoderDecoder) else max(map(len, prompts))


def _require_room(op: str, model: Any, length: int, more: int = 0) -> None:
    if model.context is not None and length + more > model.context:
        wanted = f"{length} of the prompt and {more} more" if more else f"{length}"
        raise ValueError(
            f"{op}: the model's context holds {model.context} tokens, and there are {wanted}"
        )


def stop_ids(op: str, stop: Any) -> frozenset[int]:
    """`stop` as a set of ids; empty for None. TypeError if it holds something else than ids."""
    listed = [None] if isinstance(stop, str | bytes) or not is_iterable(stop) else list(stop)
    ids = [whole(i) for i in ([] if stop is None else listed)]
    if None in ids:
        raise TypeError(f"{op}: stop must hold ids, got {stop!r:.60}")
    return frozenset(i for i in ids if i is not None)


def is_iterable(value: Any) -> bool:
    """Whether `iter(value)` works. `isinstance` is wrong for a NumPy array of shape ()."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def checked(prompts: Any) -> Ids:
    """The prompts as tuples of int. ValueError without prompts or tokens, TypeError for others."""
    rows = []
    is_list = hasattr(prompts, "__len__") and is_iterable(prompts)
    if isinstance(prompts, str | bytes) or not is_list or len(prompts) == 0:
        raise ValueError(f"prefill: prompts must hold a list of ids each, got {prompts!r:.60}")
    for i, prompt in enumerate(prompts):
        if (why := refusal(type(prompt))) is not None:
            raise TypeError(f"prefill: prompt {i} must be a list of ids, got {why}")
        row = np.asarray(prompt)
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise TypeError(f"prefill: prompt {i} must be a list of ids, got {prompt!r:.60}")
        if row.size == 0:
            raise ValueError(
                f"prefill: prompt {i} must hold at least one token, got none: begin a text with "
                "the tokenizer's bos_id, if it has one"
            )
        rows.append(tuple(row.tolist()))
    return tuple(rows)


def _require_prompt_ids(rows: Ids, embed: Any) -> None:
    """ValueError for an id outside [0, embed.vocab_size), which ops on a device do not check.

    ValueError without an embedding.
    """
    if embed is None:
        raise ValueError("prefill: the model must have an embedding, got None")
    ids = np.asarray([i for row in rows for i in row])
    require_ids("prefill", "ids", ids, embed.vocab_size, ids)


def _padded(rows: Ids, backend: Backend, *, left: bool = True) -> tuple[Array, Array | None]:
    """Padded ids (B, T), and a mask (B, T), True for tokens; None if there is no padding."""
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), longest), np.int64)
    mask = np.zeros(ids.shape, np.bool_)
    for i, row in enumerate(rows):
        part = slice(longest - len(row), None) if left else slice(len(row))
        ids[i, part], mask[i, part] = row, True
    return backend.asarray(ids), None if mask.all() else backend.asarray(mask)


def _aligned(after: PrefilledPrompt, rows: Ids, model: Any) -> PrefilledPrompt:
    """`after` with one text for each row. ValueError if the rows cannot continue it."""
    n_texts, n_rows = len(after.ids), len(rows)
    if n_texts not in (1, n_rows):
        raise ValueError(f"prefill: {n_rows} prompts cannot continue the {n_texts} texts of after")
    if len({len(row) for row in rows}) > 1 and not _bridges(model):
        raise ValueError(
            "prefill: after a prefix, the prompts must have the same length for this model: its "
            "layers depend on distances between tokens"
        )
    return after if n_texts == n_rows else after.rows((0,) * n_rows)


def _bridges(model: Any) -> bool:
    """Whether padding inside a text changes nothing.

    No layer may depend on distances in the batch, or have a state that decays at each step.
    """
    if isinstance(model, EncoderDecoder):
        return False  # targets have no padding mask
    near = any(
        config.attn.window is not None
        or config.attn.shaw_max_distance is not None
        or config.attn.xl
        or is_recurrent(config)
        for config in model.blocks
    )
    return not near and not model.alibi and model.relative_bias is None


def _start_id(model: EncoderDecoder, start: int | None) -> int:
    start = start_of(model) if start is None else start
    if start is None:
        raise ValueError("prefill: start_id, the start token of the targets, must be given")
    size = model.target_embed.vocab_size  # type: ignore[union-attr]
    require_id("prefill", size, start_id=start)
    return start
