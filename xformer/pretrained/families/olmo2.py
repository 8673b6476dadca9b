"""OLMo 2 (arXiv:2501.00656): Llama with norms of sublayers' outputs and of queries and keys."""

from __future__ import annotations

from xformer.layers import BlockConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import layers
from xformer.pretrained.names import Links, norm


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    return llama.decoder(c, head, (block_of(c),) * layers(c))


def block_of(c: Config) -> BlockConfig:
    """Return a block with norms of the outputs, and of all heads of queries and keys."""
    bias = c.flag("attention_bias", default=False)
    return llama.block(c, eps=1e-5, norm_placement="output", bias=bias, qk_norm="all")


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`)."""
    yield from llama.attention_links(f"{theirs}.self_attn", f"{ours}.attn")
    yield from llama.feed_forward_links(f"{theirs}.mlp", f"{ours}.ffn")
    yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.attn_out_norm")
    yield from norm(f"{theirs}.post_feedforward_layernorm", f"{ours}.ffn_out_norm")


FAMILY = llama.family("Olmo2", build, layer_links)
