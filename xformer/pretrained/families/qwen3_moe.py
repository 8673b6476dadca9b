"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with experts, none of them shared."""

from __future__ import annotations

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.families.mixtral import ALIASES, balancing, links_in_memory
from xformer.pretrained.families.qwen2_moe import experts, layer_links, sparse
from xformer.pretrained.family import layers


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. With `use_sliding_window`, all layers have a window."""
    c.ignore("max_window_layers", "sliding_window")  # the first is in files; nothing reads it
    size = llama.window(c, default=4096) if c.flag("use_sliding_window", default=False) else None
    bias = c.flag("attention_bias", default=False)
    d_ff = c.integer("moe_intermediate_size", low=1, default=768)
    mixture = experts(c, 128, 8, d_ff, key="num_local_experts")
    config = llama.block(c, kv_heads=4, bias=bias, qk_norm="head", window=size, ffn=mixture)
    blocks = sparse(c, (config,) * layers(c))
    return llama.decoder(c, head, blocks, max_len=32768, load_balancing_weight=balancing(c, head))


FAMILY = llama.family("Qwen3Moe", build, layer_links, in_memory=links_in_memory, aliases=ALIASES)
