"""A BlockConfig from options by one name each, for tests that vary many of them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from xformer.layers import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig

NAMES = {  # of options that have another name in their part
    "attn_dropout": ("attn", "dropout"),
    "hidden_dropout": ("ffn", "dropout"),
    "ffn_bias": ("ffn", "bias"),
    "norm": ("norm", "kind"),
    "norm_offset": ("norm", "offset"),
}
PARTS: dict[str, Any] = {"attn": AttentionConfig, "ffn": FeedForwardConfig, "norm": NormConfig}
OF_ALL = ("bias", "dropout")
NAMES |= {
    field.name: (part, field.name)
    for part, kind in PARTS.items()
    for field in fields(kind)
    if field.name not in OF_ALL
}


def block_config(d_model: int, n_heads: int, d_ff: int, **options: Any) -> BlockConfig:
    """The configuration of a block.

    bias: of all linear layers and norms; None as ffn_bias is the same
    dropout: of sublayers, and of the attention's probabilities if attn_dropout is None
    experts: instead of the feed-forward network; None: a dense network
    """
    bias, dropout = options.pop("bias", True), options.pop("dropout", 0.0)
    experts = options.pop("experts", None)
    parts: dict[str, dict[str, Any]] = {
        "attn": {"d_model": d_model, "n_heads": n_heads, "bias": bias, "dropout": dropout},
        "ffn": {"d_ff": d_ff, "bias": bias},
        "norm": {"bias": bias},
    }
    block: dict[str, Any] = {"dropout": dropout}
    for name, value in options.items():
        if value is None and name in ("ffn_bias", "attn_dropout"):
            continue
        part, field = NAMES.get(name, ("", name))
        (parts[part] if part else block)[field] = value
    configs = {part: PARTS[part](**values) for part, values in parts.items()}
    return BlockConfig(**configs | ({} if experts is None else {"ffn": experts}), **block)


def changed(config: BlockConfig, **options: Any) -> BlockConfig:
    """A copy with other options, by the same names. dropout: of the sublayers alone."""
    if "experts" in options:
        config = replace(config, ffn=options.pop("experts"))
    changes: dict[str, dict[str, Any]] = {"": {}, **{part: {} for part in PARTS}}
    if "bias" in options:
        bias = {"bias": options.pop("bias")}
        changes |= {part: dict(bias) for part in PARTS}
    for name, value in options.items():
        part, field = NAMES.get(name, ("", name))
        changes[part][field] = value
    parts = {
        part: replace(getattr(config, part), **changes[part]) for part in PARTS if changes[part]
    }
    return replace(config, **parts, **changes[""])
