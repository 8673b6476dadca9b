"""Layers, composed of ops: `y, cache = layer(x, params, side, config=config, context=context)`.

`cache.backward(dy)` returns the gradients of x, params and side, each of the type of its argument
(`layers.protocol`). Maps and norms take no side and no context.
"""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.layers.attention import (
        AttentionParams,
        KeyValue,
        KeyValueParams,
        ShawParams,
        XLParams,
        attention,
        key_value,
    )
    from xformer.layers.attention_config import AttentionConfig
    from xformer.layers.block import BlockConfig, BlockParams, block
    from xformer.layers.blocks import blocks
    from xformer.layers.embed import EmbedConfig, EmbedParams, embed
    from xformer.layers.experts import ExpertsConfig, ExpertsParams, mixture
    from xformer.layers.feed_forward import FeedForwardConfig, FeedForwardParams, feed_forward
    from xformer.layers.gated_delta_net import (
        GatedDeltaNetConfig,
        GatedDeltaNetParams,
        gated_delta_net,
    )
    from xformer.layers.kv_cache import KVCache
    from xformer.layers.latent_attention import (
        LatentAttentionConfig,
        LatentAttentionParams,
        LatentParams,
        latent_attention,
    )
    from xformer.layers.linear import BiasParams, LinearParams, LoRAParams, linear, linear_many
    from xformer.layers.norm import NormConfig, NormParams, add_norm, norm
    from xformer.layers.pooling import pool
    from xformer.layers.positions import alibi, sinusoidal
    from xformer.layers.protocol import Context, LayerConfig, SideInputs
    from xformer.layers.recurrent_state import RecurrentState
    from xformer.layers.relative import RelativeConfig, relative_bias
    from xformer.layers.residual import Branch, parallel, residual
    from xformer.layers.rope_config import RopeConfig
    from xformer.layers.rope_tables import RopeTables, rope_tables
    from xformer.layers.splade import splade
    from xformer.layers.stack import StackParams, stack

__all__ = [
    "AttentionConfig",
    "AttentionParams",
    "BiasParams",
    "BlockConfig",
    "BlockParams",
    "Branch",
    "Context",
    "EmbedConfig",
    "EmbedParams",
    "ExpertsConfig",
    "ExpertsParams",
    "FeedForwardConfig",
    "FeedForwardParams",
    "GatedDeltaNetConfig",
    "GatedDeltaNetParams",
    "KVCache",
    "KeyValue",
    "KeyValueParams",
    "LatentAttentionConfig",
    "LatentAttentionParams",
    "LatentParams",
    "LayerConfig",
    "LinearParams",
    "LoRAParams",
    "NormConfig",
    "NormParams",
    "RecurrentState",
    "RelativeConfig",
    "RopeConfig",
    "RopeTables",
    "ShawParams",
    "SideInputs",
    "StackParams",
    "XLParams",
    "add_norm",
    "alibi",
    "attention",
    "block",
    "blocks",
    "embed",
    "feed_forward",
    "gated_delta_net",
    "key_value",
    "latent_attention",
    "linear",
    "linear_many",
    "mixture",
    "norm",
    "parallel",
    "pool",
    "relative_bias",
    "residual",
    "rope_tables",
    "sinusoidal",
    "splade",
    "stack",
]

later(
    __name__,
    advance="",
    attention="AttentionParams KeyValue KeyValueParams ShawParams XLParams attention key_value",
    attention_config="AttentionConfig",
    block="BlockConfig BlockParams block",
    blocks="blocks",
    blocks_cache="",
    checkpoint="",
    embed="EmbedConfig EmbedParams embed",
    experts="ExpertsConfig ExpertsParams mixture",
    feed_forward="FeedForwardConfig FeedForwardParams feed_forward",
    gated_delta_net="GatedDeltaNetConfig GatedDeltaNetParams gated_delta_net",
    latent_attention=("LatentAttentionConfig LatentAttentionParams LatentParams latent_attention"),
    linear="BiasParams LinearParams LoRAParams linear linear_many",
    norm="NormConfig NormParams add_norm norm",
    kv_cache="KVCache",
    pooling="pool",
    positions="alibi sinusoidal",
    protocol="Context LayerConfig SideInputs",
    recurrent_state="RecurrentState",
    relative="RelativeConfig relative_bias",
    residual="Branch parallel residual",
    reversible="",
    rope_config="RopeConfig",
    rope_tables="RopeTables rope_tables",
    splade="splade",
    stack="StackParams stack",
)
