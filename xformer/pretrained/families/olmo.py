"""OLMo 2 (arXiv:2501.00656), OLMo 3 (arXiv:2512.13961) and OLMoE (arXiv:2409.02060)."""

from __future__ import annotations

from xformer.layers import BlockConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama, qwen
from xformer.pretrained.families.mistral import balancing, links_in_memory
from xformer.pretrained.family import layers
from xformer.pretrained.names import Links, norm

THETA = 500000.0


def build_2(c: Config, head: str) -> LanguageModel:
    """Return an OLMo 2: Llama with norms of sublayers' outputs and of queries and keys."""
    return llama.decoder(c, head, (block_of(c),) * layers(c))


def block_of(c: Config) -> BlockConfig:
    """Return a block with norms of the outputs, and of all heads of queries and keys."""
    bias = c.flag("attention_bias", default=False)
    return llama.block(c, eps=1e-5, norm_placement="output", bias=bias, qk_norm="all")


def build_3(c: Config, head: str) -> LanguageModel:
    """Return an OLMo 3: OLMo 2 with sliding windows, and RoPE by type of layer.

    By default each fourth layer attends to all tokens.
    """
    config = block_of(c)
    sizes = llama.windows(c, llama.window(c, default=4096), lambda i: (i + 1) % 4 != 0)
    c.only("rope_theta", THETA)  # of windows, releases of transformers read another base as THETA
    both = ("rope_theta", THETA)
    rotary = llama.rope_by_window(c, config, sizes, 2048, full=both, sliding=both)
    return llama.decoder(c, head, llama.windowed(config, sizes), rotary=rotary)


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`)."""
    yield from llama.attention_links(f"{theirs}.self_attn", f"{ours}.attn")
    yield from llama.feed_forward_links(f"{theirs}.mlp", f"{ours}.ffn")
    yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.attn_out_norm")
    yield from norm(f"{theirs}.post_feedforward_layernorm", f"{ours}.ffn_out_norm")


def build_moe(c: Config, head: str) -> LanguageModel:
    """Return an OLMoE: Llama with experts, and a norm of all queries and of all keys."""
    c.only("clip_qkv")
    mixture = qwen.experts(c, 64, 8, c.integer("intermediate_size", low=1))
    bias = c.flag("attention_bias", default=False)
    config = llama.block(c, eps=1e-5, bias=bias, qk_norm="all", ffn=mixture)
    c.only("head_dim", config.d_model // config.attn.n_heads)  # norms of transformers need it
    weight = balancing(c, head, 0.01)
    return llama.decoder(c, head, (config,) * layers(c), max_len=4096, load_balancing_weight=weight)


OLMO2 = llama.family("Olmo2", build_2, layer_links)
OLMO3 = llama.family("Olmo3", build_3, layer_links)
OLMOE = llama.family(
    "Olmoe",
    build_moe,
    qwen.layer_links,
    heads=("ForCausalLM", "Model"),
    in_memory=links_in_memory,
    aliases={"num_local_experts": "num_experts"},
)
