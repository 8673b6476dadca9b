"""`advance` by one token in one call: neither Python nor the GIL between its products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xformer.backends.append import Room, longer, reserved
from xformer.backends.numba import token
from xformer.backends.numba.atomic import nothing_done, on_all
from xformer.backends.numba.known import pinned
from xformer.backends.numba.plan import Plan, planned, unturned
from xformer.backends.numpy.threads import n_threads

from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig
from xformer.layers.past import Past
from xformer.layers.relative import RelativeConfig
from xformer.layers.rotary import Rotary
from xformer.layers.stack import StackParams
from xformer.typing import Array

FLOAT = np.dtype(np.float32)
TEXTS = 4  # at most: with more of them products of matrices are faster


def outside(
    x: Array,
    params: StackParams,
    memory: Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    past: Sequence[Past],
    n_past: int,
    relative: RelativeConfig | None = None,
    rotary: Rotary | None = None,
    mask: Array | None = None,
    memory_mask: Array | None = None,
) -> str | None:
    """Why the kernel cannot run."""
    if not (memory is bias is pos is relative is mask is memory_mask is None):
        return "a memory, a bias, positions in each layer or padding"
    if type(x) is not np.ndarray or x.ndim != 3 or not past or not configs:
        return "not one token after others"
    n_texts, n_tokens, d_model = x.shape
    before = past[0]
    if n_tokens != 1 or before.k is None or before.at is not None or not 0 < n_texts <= TEXTS:
        return f"not one token after others, of at most {TEXTS} texts"
    plan = planned(params, configs, past)
    if plan.refusal is not None:
        return plan.refusal
    if x.dtype != np.float32 or d_model != configs[0].d_model or len(past) != len(configs):
        return "only float32, and what fits the model"
    for own, heads in zip(past, plan.heads, strict=True):
        k, v, *_ = own
        if k is None or v is None or k.dtype != FLOAT or v.dtype != FLOAT:
            return "a past of another kind"
        if (*k.shape[:2], k.shape[3], v.shape[3]) != (n_texts, *heads):
            return "a past of another kind"
    return unturned(rotary, plan, n_texts, n_tokens)


def advance(
    x: Array,
    params: StackParams,
    memory: Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    past: Sequence[Past],
    n_past: int,
    relative: RelativeConfig | None = None,
    rotary: Rotary | None = None,
    mask: Array | None = None,
    memory_mask: Array | None = None,
) -> tuple[Array, tuple[Past, ...]]:
    """Its vectors (B, D) through all layers; of a large model on all threads."""
    plan = planned(params, configs, past)
    grown, table = _grown(plan, past, len(x))
    interleaved, turns = False, np.empty((2, 1, 0), x.dtype)
    if rotary is not None:
        shape = -1, rotary.cos.shape[-1]
        interleaved = rotary.interleaved
        turns = np.array((rotary.cos.reshape(shape), rotary.sin.reshape(shape)))
    own = memory_of(plan, len(x), x.shape[2])
    start, h, *_ = own
    start[:] = x[:, 0]
    stages = nothing_done(token.STAGES * len(configs) + 1)
    threads = n_threads() if plan.large else 1
    arguments = tables_of(plan, table), turns, interleaved, own
    on_all(token.advance_all, arguments, stages, (params, grown), threads)
    return h[:, None], grown


def tables_of(plan: Plan, past: Array) -> tuple[Array, ...]:
    """Those of `token.advance_all`."""
    if plan.tables is None:
        raise ValueError(f"advance: {plan.refusal}")
    maps, norms, sizes, numbers, scales = plan.tables
    return maps, norms, sizes, past, numbers, scales


def memory_of(plan: Plan, n_texts: int, width: int) -> tuple[Array, ...]:
    """x, h, ctx, hidden and parts of `token.advance_all`."""
    rows = (np.empty((n_texts, width), FLOAT) for _ in range(2))
    return *rows, *(np.empty(n_texts * n, FLOAT) for n in (plan.ctx, plan.hidden, plan.parts))


def _grown(plan: Plan, past: Sequence[Past], n_texts: int) -> tuple[tuple[Past, ...], Array]:
    """The past of each layer with a column more, not written yet; where it is in memory."""
    grown, table = [], []
    for own, config, (groups, width, value_width) in zip(
        past, plan.configs, plan.heads, strict=True
    ):
        if config.window is not None and config.window[0] is not None:
            own = own.last(config.window[0])
        more = longer(own, 1)
        if more is None:
            shape = n_texts, groups, 1
            like = (np.empty((*shape, n), np.float32) for n in (width, value_width))
            more = reserved(*like, past=own)
        own, room, end = more, more.place.room, more.place.end
        k, v = addresses(room)
        first, length = end - own.length, own.length
        table.append(
            (k[0] + 4 * first * width, *k[1:], v[0] + 4 * first * value_width, *v[1:], length)
        )
        grown.append(own)
    grown[0].place.room.plan = plan
    return tuple(grown), np.array(table, np.int64)


def addresses(room: Room) -> tuple[tuple[int, int, int], ...]:
    """Of keys and values: address, and from one text and from one head to the next."""
    if room.addresses is None:
        steps = [(x.ctypes.data, x.strides[0] // 4, x.strides[1] // 4) for x in (room.k, room.v)]
        room.addresses = *steps, pinned((room.k, room.v))
    k, v, _ = room.addresses
    return k, v
