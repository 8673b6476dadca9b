"""`advance` by the first tokens of texts: the loops of `blocks`, which keep keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xformer.backends.append import reserved
from xformer.backends.numba.advance import addresses
from xformer.backends.numba.blocks import SIZE, most, read, through
from xformer.backends.numba.plan import remembered

from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig
from xformer.layers.norm import norm
from xformer.layers.past import Past
from xformer.layers.relative import RelativeConfig
from xformer.layers.rotary import Rotary
from xformer.layers.stack import StackParams
from xformer.typing import Array


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
    if not (params.memory is params.relative is None):
        return "a shared memory or a relative bias"
    if len(past) != len(configs) or any(own.k is not None for own in past):
        return "not the first tokens"
    plan = read(x, params.blocks, configs, rotary, None)
    if isinstance(plan, str):
        return plan
    if not most(plan, x.shape[1]):
        return f"a text has more than {SIZE} numbers in its widest vectors"
    return None


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
    """Its vectors through all layers, and in each keys and values to where the past has room."""
    plan, (n_texts, n_tokens, _) = remembered(params.blocks, configs), x.shape
    grown = []
    for n_groups, *widths in plan.heads:
        k, v = (np.empty((n_texts, n_groups, n_tokens, width), x.dtype) for width in widths)
        grown.append(reserved(k, v, past=Past()))
    table = np.array([np.ravel(addresses(own.place.room)) for own in grown], np.int64)
    y = through(x, plan, (params, grown), rotary, None, True, table)
    if params.norm is not None:
        y, _ = norm(y, params.norm, config=configs[-1].norm_config)
    return y, tuple(grown)
