"""Gemma 2 (arXiv:2408.00118), Gemma 3 for text (2503.19786), EmbeddingGemma (2509.20354)."""

from __future__ import annotations

from typing import Any

from xformer.layers import BlockConfig
from xformer.layers.kv_cache import Window
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import activation
from xformer.pretrained.names import Links, norm


def build_2(c: Config, head: str) -> LanguageModel:
    """Return a Gemma 2. By default layers 0, 2, 4, ... have a sliding window."""
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


def build_3(c: Config, head: str) -> LanguageModel:
    """Return a Gemma 3 or an EmbeddingGemma.

    By default each sixth layer attends to all tokens, and the others have a sliding window and
    RoPE of another base. With `use_bidirectional_attention` (EmbeddingGemma) the model is an
    encoder, whose windows have half the size on both sides of the query.
    """
    config = block_of(c, qk_norm="head")
    c.only("attn_logit_softcapping", None)  # transformers has the key, but does not use it
    bidirectional = c.flag("use_bidirectional_attention", default=False)
    causal_window = llama.window(c, default=4096)
    local: Window | None = causal_window
    if bidirectional and causal_window is not None:
        half = (causal_window[0] + 1) // 2
        local = half, half
    each = c.integer("sliding_window_pattern", low=1, default=6)
    c.unread("_sliding_window_pattern", each)
    sizes = llama.windows(c, local, lambda i: (i + 1) % each != 0)
    bases: Any = {"full": ("rope_theta", 1e6), "sliding": ("rope_local_base_freq", 1e4)}
    return llama.decoder(
        c,
        head,
        llama.windowed(config, sizes),
        tied=True,
        embed_scale=config.d_model**0.5,
        softcap=c.number("final_logit_softcapping", low=1e-9, default=None),
        rotary=llama.rope_by_window(c, config, sizes, 131072, **bases),
        causal=not bidirectional,
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


GEMMA2 = llama.family("Gemma2", build_2, layer_links)
GEMMA3_TEXT = llama.family("Gemma3Text", build_3, layer_links)._replace(
    heads={
        "Gemma3ForCausalLM": "lm",
        "Gemma3TextForSequenceClassification": "classifier",
        "Gemma3TextModel": "hidden",
    }
)
