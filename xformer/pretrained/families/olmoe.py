"""OLMoE (arXiv:2409.02060): Llama with experts, and a norm of all queries and of all keys."""

from __future__ import annotations

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.families.mixtral import balancing, links_in_memory
from xformer.pretrained.families.qwen2_moe import experts, layer_links
from xformer.pretrained.family import layers


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    c.only("clip_qkv")
    mixture = experts(c, 64, 8, c.integer("intermediate_size", low=1))
    bias = c.flag("attention_bias", default=False)
    config = llama.block(c, eps=1e-5, bias=bias, qk_norm="all", ffn=mixture)
    c.only("head_dim", config.d_model // config.attn.n_heads)  # norms of transformers need it
    weight = balancing(c, head, 0.01)
    return llama.decoder(c, head, (config,) * layers(c), max_len=4096, load_balancing_weight=weight)


FAMILY = llama.family(
    "Olmoe",
    build,
    layer_links,
    heads=("ForCausalLM", "Model"),
    in_memory=links_in_memory,
    aliases={"num_local_experts": "num_experts"},
)
