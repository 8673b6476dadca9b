"""Gemma 2 (arXiv:2408.00118)."""

from __future__ import annotations

from typing import Any

from xformer.layers import BlockConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import activation
from xformer.pretrained.names import Links, norm


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. By default layers 0, 2, 4, ... have a sliding window."""
    c.only("use_bidirectional_attention", False)
    c.ignore("hidden_act", "cache_implementation")  # hidden_activation is used instead
    cap = c.number("attn_logit_softcapping", low=1e-9, default=50.0, null=None)
    config = block_of(c, softcap=cap)
    c.unread("sliding_window_size", c.data.get("sliding_window"))  # the 9B model has it
    sizes = llama.windows(c, llama.window(c, default=4096), lambda i: i % 2 == 0)
    return llama.decoder(
        c,
        head,
        llama.windowed(config, sizes),
        max_len=8192,
        tied=True,
        embed_scale=config.d_model**0.5,
        softcap=c.number("final_logit_softcapping", low=1e-9, default=30.0, null=None),
    )


def block_of(c: Config, **attn: Any) -> BlockConfig:
    """Return a block with norms before and after each sublayer. attn: of `llama.attend`."""
    return llama.block(
        c,
        kv_heads=4,
        d_head=256,
        norm_placement="sandwich",
        norm_offset=1.0,
        ffn=llama.gated(c, activation(c, "hidden_activation", "gelu_pytorch_tanh")),
        bias=c.flag("attention_bias", default=False),
        scale=c.number("query_pre_attn_scalar", low=1e-9, default=256.0) ** -0.5,
        **attn,
    )


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`).

    The names are Llama's, except for the norms: two before, two after.
    """
    yield from llama.attention_links(f"{theirs}.self_attn", f"{ours}.attn")
    yield from llama.feed_forward_links(f"{theirs}.mlp", f"{ours}.ffn")
    yield from norm(f"{theirs}.input_layernorm", f"{ours}.attn_norm")
    yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.attn_out_norm")
    yield from norm(f"{theirs}.pre_feedforward_layernorm", f"{ours}.ffn_norm")
    yield from norm(f"{theirs}.post_feedforward_layernorm", f"{ours}.ffn_out_norm")


FAMILY = llama.family("Gemma2", build, layer_links)
