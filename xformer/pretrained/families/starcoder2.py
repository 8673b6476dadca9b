"""StarCoder2 (arXiv:2402.19173): LayerNorm, biases, and a feed-forward network without a gate."""

from __future__ import annotations

from xformer.layers import BlockConfig, FeedForwardConfig, NormConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import activation, layers, rate
from xformer.pretrained.names import Links, linear


def build(c: Config, head: str) -> LanguageModel:
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
        llama.attend(c, kv_heads=2, bias=bias, window=llama.window(c)),
        FeedForwardConfig(c.integer("intermediate_size", low=1), act, bias=bias),
        NormConfig(eps=eps),
        dropout=rate(c, "residual_dropout", 0.0),
    )
    dropout = rate(c, "embedding_dropout", 0.0)
    blocks = (block,) * layers(c)
    return llama.decoder(c, head, blocks, max_len=4096, tied=True, embed_dropout=dropout)


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`)."""
    yield from llama.block_links(theirs, ours)
    yield from linear(f"{theirs}.mlp.c_fc", f"{ours}.ffn.up")
    yield from linear(f"{theirs}.mlp.c_proj", f"{ours}.ffn.down")


FAMILY = llama.family("Starcoder2", build, layer_links)
