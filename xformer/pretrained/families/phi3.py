"""Phi-3 (arXiv:2404.14219) and Phi-4: Llama with fused linear maps."""

from __future__ import annotations

from dataclasses import replace

from xformer.layers import BlockConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import layers, rate
from xformer.pretrained.names import Link, Links, fused, linear, norm
from xformer.pretrained.rope import rope

TYPES = {"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")}
MAX_LEN = 4096


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    c.ignore("embd_pdrop")  # transformers has no dropout there
    c.unread("attention_bias", False)
    config = replace(
        llama.block(c, eps=1e-5, window=llama.window(c)), dropout=rate(c, "resid_pdrop", 0.0)
    )
    width = config.attn.head_width
    turned = rope(c, width=width, max_len=MAX_LEN, share=1.0, original=MAX_LEN, types=TYPES)
    return llama.decoder(c, head, (config,) * layers(c), rotary=turned)


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`).

    The file has queries, keys and values side by side, and so gate and up.
    """
    qkv, n, n_kv = f"{theirs}.self_attn.qkv_proj", config.attn.n_heads, config.attn.kv_heads
    yield from norm(f"{theirs}.input_layernorm", f"{ours}.attn_norm")
    yield from fused(f"{qkv}.weight", f"{qkv}.bias", f"{ours}.attn", shares=(n, n_kv, n_kv))
    yield from linear(f"{theirs}.self_attn.o_proj", f"{ours}.attn.o")
    yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm")
    gate_up = f"{ours}.ffn.gate.w", f"{ours}.ffn.up.w"
    yield Link((f"{theirs}.mlp.gate_up_proj.weight",), gate_up, flip=True)
    yield from linear(f"{theirs}.mlp.down_proj", f"{ours}.ffn.down")


FAMILY = llama.family("Phi3", build, layer_links)
