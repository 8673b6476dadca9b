"""`blocks` of a batch in training: each thread's share in one call forward, and in one back.

Between the calls of ops, or of layers, the threads would wait for each other's Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
from xformer.backends.numba import share_loops
from xformer.backends.numba.atomic import needed, nothing_done, place
from xformer.backends.numba.blocks import read, tile_of_layer, turns_of
from xformer.backends.numba.compiled import PLAIN
from xformer.backends.numba.gemm import products
from xformer.backends.numba.plan import Plan, remembered
from xformer.backends.numba.sdpa import pad_of
from xformer.backends.numba.share_layout import gradients, layout_of, memory_of
from xformer.backends.numpy.blocks import require_no_routers, unshared, without_layers
from xformer.backends.numpy.threads import lined, n_threads, run, scratch

from xformer import ops
from xformer.checks import require_gradient
from xformer.dispatch import keeps_nothing
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.blocks import order_of
from xformer.layers.past import Past
from xformer.layers.rotary import Rotary
from xformer.typing import Array


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
    if keeps_nothing():
        return "only for a backward"
    if checkpoint:
        return "no checkpoints"
    if not (memory is bias is pos is memory_pos is past is memory_mask is None):
        return "a memory, a bias, positions in each layer or a text that grows"
    if dropout_key is not None and any(
        c.dropout or c.probs_dropout or c.hidden_dropout for c in configs
    ):
        return "no dropout"
    if why := other_norms(params, configs):
        return why
    plan = read(x, params, configs, rotary, mask)
    if isinstance(plan, str):
        return plan
    if plan.frozen:
        return "what is frozen has no gradient"
    return unshared(x, params, configs=configs, rotary=rotary, mask=mask)


def other_norms(params: tuple[BlockParams, ...], configs: Sequence[BlockConfig]) -> str | None:
    """Why the loops have not such."""
    if any(c.norm == "post" for c in configs) or any(
        p.attn_out_norm or p.ffn_out_norm for p in params
    ):
        return "only norms before the branches"
    return None


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
) -> tuple[Array, SharesCache]:
    """Shares of x; of each a row of what is kept."""
    plan, (n_texts, length, _) = remembered(params, configs), x.shape
    if plan.tables is None:
        raise ValueError(f"blocks: {plan.refusal}")
    tiles = np.array([tile_of_layer(config, causal, length) for config in configs], np.int64)
    pad = np.array(pad_of(mask, n_texts, length, x.dtype), order="C")
    options = tiles, *turns_of(rotary, x.dtype), pad
    size = -(-n_texts // n_threads())
    starts = layout_of(plan, params, size * length).starts
    x, y = np.require(x, None, PLAIN), np.empty(x.shape, x.dtype)
    kept = lined((-(-n_texts // size), int(starts[-1, -1])), x.dtype)

    def forward(share: int) -> None:
        h = scratch("h", (size * length, x.shape[2]), x.dtype)
        own = kept[share], starts, y, h
        share_loops.forward(products(), share, size, plan.tables, options, x, *own)

    run([partial(forward, share) for share in range(len(kept))])
    return y, SharesCache(params, tuple(configs), options, size, x, kept)


class SharesCache(NamedTuple):
    """What `blocks` keeps for its backward."""

    params: tuple[BlockParams, ...]
    configs: tuple[BlockConfig, ...]
    options: tuple[Array, Array, bool, Array]  # of attention: tiles, turns, interleaved, pad
    size: int  # how many texts a share has, at most
    x: Array  # (B, T, D)
    kept: Array  # of each share a row, as in `share_loops`

    @property
    def blocks(self) -> NoReturn:
        """AttributeError, where `BlocksCache` has the cache of each layer."""
        without_layers()

    def backward(self, dy: Array, drouter_logits: Sequence[None] | None = None) -> tuple[Any, ...]:
        """As that of NumPy's `SharesCache`; shares add to one another's gradients in turn."""
        require_gradient("blocks", "dy", dy, self.x)
        require_no_routers(drouter_logits)
        # Anew, since a cache may have been copied: addresses are of these parameters.
        plan = remembered(self.params, self.configs)
        if plan.tables is None:
            raise ValueError(f"blocks: {plan.refusal}")
        dx, dy = np.empty(self.x.shape, dy.dtype), np.require(dy, None, PLAIN)
        kept = self.options, self.size, self.x, self.kept
        grads = gradients_of(share_loops.backward, plan, self.params, *kept, dy, (dx,))
        return dx, grads, None, None, None, None


def gradients_of(
    loops: Callable[..., Any],
    plan: Plan,
    params: tuple[BlockParams, ...],
    options: tuple[Array, Array, bool, Array],
    size: int,
    x: Array,
    kept: Array,
    dy: Array,
    to: tuple[Array, ...],
) -> tuple[BlockParams, ...]:
    """Those of blocks, while `loops` of each share write what else there is.

    loops, to: `share_loops.backward` and (dx,), or `language_model_loops.backward` and (dx, ids,
    dtable, dpositions). The rest as `SharesCache` has it.
    """
    tiles, turns, interleaved, pad = options
    back = turns * np.array([1, -1], turns.dtype)[:, None, None, None]
    layout = layout_of(plan, params, size * x.shape[1])
    if kept.shape != (-(-len(x) // size), layout.starts[-1, -1]):
        raise ValueError(f"blocks: x must have its shape of the forward, got {x.shape}")
    memory, made = memory_of(layout), list[tuple[BlockParams, ...]]()
    stages = nothing_done(len(params) + 1)
    given = (
        size,
        plan.tables,
        (tiles, back, interleaved, pad),
        np.array(order_of(params, plan.configs), np.int64),
        x,
        kept,
        layout.starts,
        dy,
        place(memory),
        layout.dmaps,
        layout.dnorms,
        layout.totals,
        *to,
    )

    def share() -> None:
        with needed(stages):
            mine = scratch("dblock", (int(layout.totals[:, 1].max()),), x.dtype)
            own = scratch("slopes", (int(layout.rooms[-1]),), x.dtype)
            loops(products(), *given, mine, own, layout.rooms[:-1], stages)
        if not made:  # by whoever is ready first, and would wait
            made.append(gradients(layout, memory))

    run([share] * len(kept))
    return made[0]
