"""StarCoder2 (arXiv:2402.19173): LayerNorm, biases, and a feed-forward network without a gate."""

from __future__ import annotations

from collections.abc import Collection

from xformer.layers import BlockConfig, FeedForwardConfig, NormConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families.llama import (
    attend,
    block_links,
    decoder,
    family,
    top_links,
    window,
)
from xformer.pretrained.family import activation, layers, rate
from xformer.pretrained.names import Links, linear, same


def build(c: Config, head: str, names: Collection[str] | None) -> LanguageModel:
    """Return the model of a configuration."""
    for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        c.unread(name, True)
    c.unread("scale_attn_weights", True)
    c.unread("mlp_type", "default")
    c.unread("norm_type", "layer_norm")
    eps = c.number("norm_epsilon", low=0, default=1e-5)
    c.unread("layer_norm_epsilon", eps)
    bias = c.flag("use_bias", default=True)
    act = activation(c, "hidden_act", "gelu_pytorch_tanh")
    block = BlockConfig(
        attend(c, kv_heads=2, bias=bias, window=window(c)),
        FeedForwardConfig(c.integer("intermediate_size", low=1), act, bias=bias),
        NormConfig(eps=eps),
        dropout=rate(c, "residual_dropout", 0.0),
    )
    dropout = rate(c, "embedding_dropout", 0.0)
    blocks = (block,) * layers(c)
    return decoder(c, head, blocks, max_len=4096, tied=True, embed_dropout=dropout)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from same("model.embed_tokens.weight", "embed.table")
    for i in range(len(model.blocks)):
        yield from block_links(f"model.layers.{i}", f"stack.blocks.{i}")
        yield from linear(f"model.layers.{i}.mlp.c_fc", f"stack.blocks.{i}.ffn.up")
        yield from linear(f"model.layers.{i}.mlp.c_proj", f"stack.blocks.{i}.ffn.down")
    yield from top_links()


FAMILY = family("Starcoder2", build, links)
