"""`blocks` of some tokens in one call where nothing is kept: threads meet without Python."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from xformer.backends.numba import layer, tokens
from xformer.backends.numba.atomic import nothing_done, on_each
from xformer.backends.numba.compiled import AMD
from xformer.backends.numba.gemm import no_products, products
from xformer.backends.numba.plan import Plan, remembered, unturned
from xformer.backends.numba.sdpa import FAR, pad_of, tile_of
from xformer.backends.numpy.blocks import unshared
from xformer.backends.numpy.threads import blocks as on_threads
from xformer.backends.numpy.threads import even, n_threads, scratch

from xformer import ops
from xformer.dispatch import Dropped, keeps_nothing
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.past import Past
from xformer.layers.rotary import Rotary
from xformer.typing import Array

SIZE = 1 << 21  # numbers of the widest vectors, hidden ones or q, k and v, at once: near a core
# Columns of x for each row of a thread, at most, for pieces of rows: each packs all of w, but none
# waits for what another core has computed, which takes longer on Intel's.
WIDE = 0 if AMD else 8


def outside(
    x: Array,
    params: tuple[BlockParams, ...],
    memory: Array | KeyValue | Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    rotary: Rotary | None = None,
    past: Sequence[Past] | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.Key | None = None,
    checkpoint: bool = False,
) -> str | None:
    """Why the kernel cannot run."""
    if not keeps_nothing():
        return "only within inference()"
    if not (memory is bias is pos is memory_pos is past is memory_mask is dropout_key is None):
        return "a memory, a bias, positions in each layer, a text that grows or dropout"
    plan = read(x, params, configs, rotary, mask)
    if isinstance(plan, str):
        return plan
    if not most(plan, x.shape[1]):
        return f"a text has more than {SIZE} numbers in its widest vectors"
    # NumPy's kernel cuts the batch, and asks for a kernel of each share.
    options: Any = {"configs": configs, "rotary": rotary, "mask": mask, "causal": causal}
    if unshared(x, params, **options) is None:
        return "each thread comes here with its own share of the batch"
    return None


def read(
    x: Array,
    params: tuple[BlockParams, ...],
    configs: Sequence[BlockConfig],
    rotary: Rotary | None,
    mask: Array | None,
) -> Plan | str:
    """The plan of loops over whole layers, or why they cannot read these."""
    if type(x) is not np.ndarray or x.ndim != 3 or x.dtype != np.float32:
        return "only NumPy's own arrays of float32"
    n_texts, n_tokens, d_model = x.shape
    if x.size == 0:
        return "no tokens"
    if mask is not None and (
        type(mask) is not np.ndarray
        or mask.dtype != np.bool_
        or mask.shape not in ((n_texts, 1, 1, n_tokens), (1, 1, 1, n_tokens))
    ):
        return "only masks of keys"
    plan = remembered(params, configs)
    why = plan.refusal or (None if d_model == configs[0].d_model else "only what fits the model")
    return why or unturned(rotary, plan, n_texts, n_tokens) or no_products() or plan


def blocks(
    x: Array,
    params: tuple[BlockParams, ...],
    memory: Array | KeyValue | Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    rotary: Rotary | None = None,
    past: Sequence[Past] | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.Key | None = None,
    checkpoint: bool = False,
) -> tuple[Array, Dropped]:
    """Some texts together, piece by piece on all threads; then the next ones."""
    plan = remembered(params, configs)
    no_past = np.empty((len(configs), 0), np.int64)
    return through(x, plan, params, rotary, mask, causal, no_past), Dropped()


def through(
    x: Array,
    plan: Plan,
    owner: Any,
    rotary: Rotary | None,
    mask: Array | None,
    causal: bool,
    past: Array,
) -> Array:
    """x through all layers; whose memory the tables speak of is the owner's.

    past: (L, 6), where each layer's keys and values are to be kept, as `layer` has it, or (L, 0).
    ValueError for a plan without tables.
    """
    if plan.tables is None:
        raise ValueError(f"through: {plan.refusal}")
    n_texts, n_tokens, _ = x.shape
    y = np.array(x, order="C")
    pad = np.array(pad_of(mask, n_texts, n_tokens, x.dtype), order="C")
    turns, interleaved = turns_of(rotary, x.dtype)
    size = even(n_texts, most(plan, n_tokens))
    for start in range(0, n_texts, size):
        own = slice(start, start + size)
        its = turns if turns.shape[1] == 1 else turns[:, own].copy()
        options = its, interleaved, pad[own], _behind(past, start)
        _through(plan, y[own], owner, options, causal)
    return y


def _behind(past: Array, n_texts: int) -> Array:
    """The same behind so many texts."""
    past = past.copy()
    if past.size:
        past[:, layer.KEYS] += 4 * n_texts * past[:, layer.KEYS_TEXT]
        past[:, layer.VALUES] += 4 * n_texts * past[:, layer.VALUES_TEXT]
    return past


def most(plan: Plan, n_tokens: int) -> int:
    """How many texts at once."""
    return SIZE // (n_tokens * max(plan.mapped, plan.hidden))


def _through(plan: Plan, x: Array, owner: Any, options: tuple[Any, ...], causal: bool) -> None:
    """x, which is written over. options: as loops have them, turns to past."""
    tables: Any = plan.tables
    maps, norms, sizes, numbers, scales = tables
    configs, (n_texts, length, d_model) = plan.configs, x.shape
    n, post = n_texts * length, configs[0].norm == "post"
    y = x.reshape(n, d_model)
    gated = bool(maps[:, layer.GATE, layer.N_OUT].any())
    n_heads = int(sizes[:, layer.HEADS].max())
    arguments = (
        n_threads(),
        n * WIDE >= n_threads() * d_model,
        maps,
        norms,
        sizes,
        numbers,
        scales,
        np.array([tile_of_layer(config, causal, length) for config in configs], np.int64),
        *options,
        y,
        y if post else scratch("h", y.shape, x.dtype),
        scratch("mapped", (n * max(plan.mapped, d_model),), x.dtype),
        scratch("ctx", (n * plan.ctx,), x.dtype),
        scratch("hidden", (n * plan.hidden,), x.dtype),
        scratch("opened", (n * plan.hidden if gated else 0,), x.dtype),
        scratch("statistics", (2 * n * n_heads,), x.dtype),
    )
    stages = nothing_done(tokens.STAGES * len(configs) + 1)

    def loops(*given: Any) -> None:
        tokens.all_layers(products(), *given)

    on_threads(partial(on_each, loops, arguments, stages, owner), n_threads(), 1)


def tile_of_layer(config: BlockConfig, causal: bool, n: int) -> tuple[int, int, int, int]:
    """How far a query sees, and the sizes of attention's tiles."""
    left, right = config.window or (None, None)
    left, right = (FAR if x is None else min(x, FAR) for x in (left, 0 if causal else right))
    return left, right, *tile_of(n, n, right)


def turns_of(rotary: Rotary | None, dtype: Any) -> tuple[Array, bool]:
    """Cosines and sines (2, B or 1, T, R/2), R = 0 without; and whether they are interleaved."""
    if rotary is None:
        return np.empty((2, 1, 0, 0), dtype), False
    shape = -1, *rotary.cos.shape[-2:]
    tables = rotary.cos.reshape(shape), rotary.sin.reshape(shape)
    return np.array(tables), rotary.interleaved
