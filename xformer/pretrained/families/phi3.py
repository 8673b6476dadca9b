"""Phi-3 (arXiv:2404.14219) and Phi-4: Llama with fused linear maps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families.llama import block, decoder, family, top_links, window
from xformer.pretrained.family import layers, rate
from xformer.pretrained.names import Link, Links, fused, linear, norm, same
from xformer.pretrained.rope import rope

TYPES = {"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")}
MAX_LEN = 4096


def build(c: Config, head: str, names: Collection[str] | None) -> LanguageModel:
    """Return the model of a configuration."""
    c.ignore("embd_pdrop")  # transformers has no dropout there
    c.unread("attention_bias", False)
    config = replace(block(c, eps=1e-5, window=window(c)), dropout=rate(c, "resid_pdrop", 0.0))
    max_len = c.integer("max_position_embeddings", low=1, default=MAX_LEN)
    width = config.attn.head_width
    turned = rope(c, width=width, max_len=max_len, share=1.0, original=MAX_LEN, types=TYPES)
    return decoder(c, head, (config,) * layers(c), max_len=MAX_LEN, rotary=turned)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`).

    The file has queries, keys and values side by side, and so gate and up.
    """
    yield from same("model.embed_tokens.weight", "embed.table")
    for i, config in enumerate(model.blocks):
        theirs, ours = f"model.layers.{i}", f"stack.blocks.{i}"
        qkv, n, n_kv = f"{theirs}.self_attn.qkv_proj", config.attn.n_heads, config.attn.kv_heads
        yield from norm(f"{theirs}.input_layernorm", f"{ours}.attn_norm")
        yield from fused(f"{qkv}.weight", f"{qkv}.bias", f"{ours}.attn", shares=(n, n_kv, n_kv))
        yield from linear(f"{theirs}.self_attn.o_proj", f"{ours}.attn.o")
        yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm")
        gate_up = f"{ours}.ffn.gate.w", f"{ours}.ffn.up.w"
        yield Link((f"{theirs}.mlp.gate_up_proj.weight",), gate_up, flip=True)
        yield from linear(f"{theirs}.mlp.down_proj", f"{ours}.ffn.down")
    yield from top_links()


FAMILY = family("Phi3", build, links)
