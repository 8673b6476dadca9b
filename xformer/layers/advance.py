"""A stack of blocks that goes on with a text: what comes after each token, and the grown past."""

from __future__ import annotations

from collections.abc import Sequence

from xformer import layers
from xformer.dispatch import overridable
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig
from xformer.layers.past import Past
from xformer.layers.stack import StackParams, stack
from xformer.typing import Array


@overridable(backward=False)
def advance(
    x: Array,
    params: StackParams,
    memory: Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    past: Sequence[Past],
    n_past: int | Array,
    relative: layers.RelativeConfig | None = None,
    rotary: layers.Rotary | None = None,
    mask: Array | None = None,
    memory_mask: Array | None = None,
) -> tuple[Array, tuple[Past, ...]]:
    """`layers.stack`, causal, for a text that grows; nothing is kept for a backward.

    x, y: (B, T, D), of the new tokens. past: of each layer; n_past, the tokens so far, of which
    windows may have dropped some, an integer array () in fixed columns (`Past.at`). memory: as
    `memory_of` makes it, once for all steps.
    """
    y, cache = stack(
        x,
        params,
        memory,
        bias,
        pos,
        configs=configs,
        past=past,
        n_past=n_past,
        relative=relative,
        rotary=rotary,
        mask=mask,
        causal=True,
        memory_mask=memory_mask,
    )
    return y, cache.layers.past
