"""Layers: ops put together, `y, cache = layer(x, params, ...)`; gradients have the params' type."""

from xformer.layers.attention import (
    AttentionParams,
    KeyValue,
    KeyValueParams,
    attention,
    key_value,
)
from xformer.layers.block import BlockConfig, BlockParams, block
from xformer.layers.embed import EmbedConfig, EmbedParams, embed
from xformer.layers.feed_forward import FeedForwardParams, feed_forward
from xformer.layers.linear import LinearParams
from xformer.layers.norm import LayerNormParams
from xformer.layers.positions import sinusoidal
from xformer.layers.residual import residual
from xformer.layers.stack import StackParams, stack

__all__ = [
    "AttentionParams",
    "BlockConfig",
    "BlockParams",
    "EmbedConfig",
    "EmbedParams",
    "FeedForwardParams",
    "KeyValue",
    "KeyValueParams",
    "LayerNormParams",
    "LinearParams",
    "StackParams",
    "attention",
    "block",
    "embed",
    "feed_forward",
    "key_value",
    "residual",
    "sinusoidal",
    "stack",
]
