"""OLMo 2 (arXiv:2501.00656): Llama with norms of sublayers' outputs and of queries and keys."""

from __future__ import annotations

from collections.abc import Collection

from xformer.layers import BlockConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families.llama import (
    attention_links,
    block,
    decoder,
    family,
    feed_forward_links,
    top_links,
)
from xformer.pretrained.family import layers
from xformer.pretrained.names import Links, norm, same


def build(c: Config, head: str, names: Collection[str] | None) -> LanguageModel:
    """Return the model of a configuration."""
    return decoder(c, head, (block_of(c),) * layers(c))


def block_of(c: Config) -> BlockConfig:
    """Return a block with norms of the outputs, and of all heads of queries and keys."""
    bias = c.flag("attention_bias", default=False)
    return block(c, eps=1e-5, norm_placement="output", bias=bias, qk_norm="all")


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from same("model.embed_tokens.weight", "embed.table")
    for i in range(len(model.blocks)):
        theirs, ours = f"model.layers.{i}", f"stack.blocks.{i}"
        yield from attention_links(f"{theirs}.self_attn", f"{ours}.attn")
        yield from feed_forward_links(f"{theirs}.mlp", f"{ours}.ffn")
        yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.attn_out_norm")
        yield from norm(f"{theirs}.post_feedforward_layernorm", f"{ours}.ffn_out_norm")
    yield from top_links()


FAMILY = family("Olmo2", build, links)
