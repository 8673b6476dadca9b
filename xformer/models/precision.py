"""Which models can be trained in bfloat16 and float16."""

from __future__ import annotations

from typing import Any

from xformer.layers import AttentionConfig, BlockConfig
from xformer.layers.recurrent_state import is_recurrent

REBUILT = (
    "backward rebuilds the input of each block from its output, and its rounding errors add up "
    "over the blocks; use activation_checkpointing instead"
)


def require_reducible(op: str, model: Any, precision: str | None) -> None:
    """ValueError if the blocks have an option that cannot be trained in `precision`.

    model: of `xformer.models`. Any other object has no blocks, and passes.
    precision: "bfloat16", "float16", or None, which all models have
    """
    if precision is None:
        return
    for config in dict.fromkeys(getattr(model, "blocks", ())):
        if obstacle := _obstacle(config):
            name, why = obstacle
            raise ValueError(f"{op}: precision {precision} excludes {name}: {why}")


def _obstacle(config: BlockConfig) -> tuple[str, str] | None:
    """The option, and why a block with it cannot be trained in two bytes; None if it can."""
    if config.reversible:
        return "reversible", REBUILT
    if config.residual_scale is not None:
        return "residual_scale", "ops.scale has no kernel for it; train in float32"
    if not isinstance(config.attn, AttentionConfig):
        if is_recurrent(config):
            return "gated DeltaNet", "no kernel has its ops; train in float32"
        return "latent attention", "backward would add gradients of heads in two bytes"
    if config.residual_multiplier != 1.0:
        return "residual_multiplier", "no kernel multiplies by it; train in float32"
    if config.attn.xl:
        return "attn.xl", "ops.xl_attention has no kernel for it; train in float32"
    return None
