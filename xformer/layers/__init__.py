"""Layers, composed of ops: `y, cache = layer(x, params, side, config=config, context=context)`.

`cache.backward(dy)` returns the gradients of x, params and side, each of the type of its argument
(`layers.protocol`). Maps and norms take no side and no context.
"""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.layers.attention import AttentionParams as AttentionParams
    from xformer.layers.attention import KeyValue as KeyValue
    from xformer.layers.attention import KeyValueParams as KeyValueParams
    from xformer.layers.attention import ShawParams as ShawParams
    from xformer.layers.attention import XLParams as XLParams
    from xformer.layers.attention import attention as attention
    from xformer.layers.attention import key_value as key_value
    from xformer.layers.attention_config import AttentionConfig as AttentionConfig
    from xformer.layers.block import BlockConfig as BlockConfig
    from xformer.layers.block import BlockParams as BlockParams
    from xformer.layers.block import block as block
    from xformer.layers.blocks import blocks as blocks
    from xformer.layers.embed import EmbedConfig as EmbedConfig
    from xformer.layers.embed import EmbedParams as EmbedParams
    from xformer.layers.embed import embed as embed
    from xformer.layers.experts import ExpertsConfig as ExpertsConfig
    from xformer.layers.experts import ExpertsParams as ExpertsParams
    from xformer.layers.experts import mixture as mixture
    from xformer.layers.feed_forward import FeedForwardConfig as FeedForwardConfig
    from xformer.layers.feed_forward import FeedForwardParams as FeedForwardParams
    from xformer.layers.feed_forward import feed_forward as feed_forward
    from xformer.layers.gated_delta_net import GatedDeltaNetConfig as GatedDeltaNetConfig
    from xformer.layers.gated_delta_net import GatedDeltaNetParams as GatedDeltaNetParams
    from xformer.layers.gated_delta_net import gated_delta_net as gated_delta_net
    from xformer.layers.kv_cache import KVCache as KVCache
    from xformer.layers.latent_attention import LatentAttentionConfig as LatentAttentionConfig
    from xformer.layers.latent_attention import LatentAttentionParams as LatentAttentionParams
    from xformer.layers.latent_attention import LatentParams as LatentParams
    from xformer.layers.latent_attention import latent_attention as latent_attention
    from xformer.layers.linear import BiasParams as BiasParams
    from xformer.layers.linear import LinearParams as LinearParams
    from xformer.layers.linear import LoRAParams as LoRAParams
    from xformer.layers.linear import linear as linear
    from xformer.layers.linear import linear_many as linear_many
    from xformer.layers.norm import NormConfig as NormConfig
    from xformer.layers.norm import NormParams as NormParams
    from xformer.layers.norm import add_norm as add_norm
    from xformer.layers.norm import norm as norm
    from xformer.layers.pooling import pool as pool
    from xformer.layers.positions import alibi as alibi
    from xformer.layers.positions import sinusoidal as sinusoidal
    from xformer.layers.protocol import Context as Context
    from xformer.layers.protocol import LayerConfig as LayerConfig
    from xformer.layers.protocol import SideInputs as SideInputs
    from xformer.layers.recurrent_state import RecurrentState as RecurrentState
    from xformer.layers.relative import RelativeConfig as RelativeConfig
    from xformer.layers.relative import relative_bias as relative_bias
    from xformer.layers.residual import Branch as Branch
    from xformer.layers.residual import parallel as parallel
    from xformer.layers.residual import residual as residual
    from xformer.layers.rope_config import RopeConfig as RopeConfig
    from xformer.layers.rope_tables import RopeTables as RopeTables
    from xformer.layers.rope_tables import rope_tables as rope_tables
    from xformer.layers.splade import splade as splade
    from xformer.layers.stack import StackParams as StackParams
    from xformer.layers.stack import stack as stack

later(__name__, "advance", "blocks_cache", "checkpoint", "reversible")
