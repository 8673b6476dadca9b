"""gpt-oss (arXiv:2508.10925): experts with biases, attention sinks, alternating windows."""

from __future__ import annotations

from xformer.layers import BlockConfig, ExpertsConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.families.mistral import ALIASES, balancing
from xformer.pretrained.names import Link, Links, same
from xformer.pretrained.rope import rope

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. By default, layers 0, 2, ... have a sliding window."""
    c.ignore("hidden_act")  # the experts have the clamped SwiGLU of these two constants
    c.only("swiglu_alpha", 1.702)
    c.only("swiglu_limit", 7.0)
    top_k = c.integer("num_experts_per_tok", low=1, high=1024, default=4)
    c.unread("experts_per_token", top_k)  # in the published files, as the next one
    c.unread("initial_context_length", 4096)
    mixture = ExpertsConfig(
        n_experts=c.integer("num_local_experts", low=1, high=1024, default=128),
        top_k=top_k,
        d_ff=c.integer("intermediate_size", low=1),
        activation="clamped_swiglu",
        bias=True,
    )
    config = llama.block(
        c,
        eps=1e-5,
        kv_heads=8,
        d_head=64,
        bias=c.flag("attention_bias", default=True),
        sinks=True,
        ffn=mixture,
    )
    sizes = llama.windows(c, llama.window(c, default=128), lambda i: i % 2 == 0)
    width = config.attn.head_width
    return llama.decoder(
        c,
        head,
        llama.windowed(config, sizes),
        rotary=rope(c, width=width, max_len=131072, theta=150000.0, default=YARN),
        load_balancing_weight=balancing(c, head),
    )


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`).

    Gate and up of all experts are one tensor (E, D, 2 F), in alternate columns.
    """
    yield from llama.block_links(theirs, ours)
    yield from same(f"{theirs}.self_attn.sinks", f"{ours}.attn.sinks")
    mlp, ffn = f"{theirs}.mlp", f"{ours}.ffn"
    yield Link((f"{mlp}.router.weight",), (f"{ffn}.router",), flip=True)
    yield from same(f"{mlp}.router.bias", f"{ffn}.router_bias")
    for end in ("", "_bias"):
        both = (f"{ffn}.gate{end}", f"{ffn}.up{end}")
        yield Link((f"{mlp}.experts.gate_up_proj{end}",), both, groups=config.ffn.d_ff)
        yield from same(f"{mlp}.experts.down_proj{end}", f"{ffn}.down{end}")


FAMILY = llama.family("GptOss", build, layer_links, aliases=ALIASES)
