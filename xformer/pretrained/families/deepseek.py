"""DeepSeek-V2 (arXiv:2405.04434), and DeepSeek-V3 and R1 (arXiv:2412.19437).

They have latent attention, and experts beside shared ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from xformer.layers import BlockConfig, ExpertsConfig, LatentAttentionConfig, NormConfig, RopeConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.families.mistral import links_in_memory, mixture_links
from xformer.pretrained.families.qwen import PARTS
from xformer.pretrained.family import activation, layers, rate
from xformer.pretrained.names import Links, linear, norm, same
from xformer.pretrained.rope import rope

THETA = 10000.0


def build_v2(c: Config, head: str) -> LanguageModel:
    """Return a DeepSeek-V2."""
    c.only("norm_topk_prob", False)  # transformers has it, and does not normalise
    c.only("mlp_bias", False)
    c.unread("scoring_func", "softmax")
    groups: dict[str, int] = {}
    method = c.text("topk_method", choices=("greedy", "group_limited_greedy"), default="greedy")
    n_groups, top_groups = (
        c.integer(name, low=1, high=1024, default=None) for name in ("n_group", "topk_group")
    )
    if method != "greedy":
        for name, value in (("n_group", n_groups), ("topk_group", top_groups)):
            if value is None:
                raise c.refused(name, f"an int, as topk_method {method!r} needs")
        groups = {"n_groups": n_groups, "top_groups": top_groups}
    config = mixture(
        c,
        n_experts=64,
        n_shared=2,
        d_ff=1407,
        normalise=False,
        weight_scale=c.number("routed_scaling_factor", default=1.0),
        **groups,
    )
    return model(c, head, config, n_dense=0, max_len=2048)


def build_v3(c: Config, head: str) -> LanguageModel:
    """Return a DeepSeek-V3: V2 with a router whose load is balanced without a loss."""
    c.ignore("num_nextn_predict_layers")  # the layers that predict later tokens are left out
    c.unread("scoring_func", "sigmoid")
    c.unread("topk_method", "noaux_tc")
    n_groups = c.integer("n_group", low=1, high=1024, default=8)
    config = mixture(
        c,
        n_experts=256,
        n_shared=1,
        d_ff=2048,
        top_k=8,
        normalise=c.flag("norm_topk_prob", default=True),
        score="sigmoid",
        correction=True,
        weight_scale=c.number("routed_scaling_factor", default=2.5),
        n_groups=n_groups,
        top_groups=c.integer("topk_group", low=1, high=1024, default=4),
        group_top=2 if n_groups > 1 else 1,
    )
    interleaved = c.flag("rope_interleave", default=True)
    return model(c, head, config, n_dense=3, max_len=4096, interleaved=interleaved)


def mixture(
    c: Config, *, n_experts: int, n_shared: int, d_ff: int, **options: Any
) -> ExpertsConfig:
    """Return the configuration of the experts and the shared ones, which are one wide network.

    n_experts, n_shared, d_ff: the family's values if the configuration has no such key
    options: further options of `ExpertsConfig`, and `top_k` if the family has one
    """
    default = {"default": options.pop("top_k")} if "top_k" in options else {}
    width = c.integer("moe_intermediate_size", low=1, default=d_ff)
    return ExpertsConfig(
        n_experts=c.integer("n_routed_experts", low=1, high=1024, default=n_experts),
        top_k=c.integer("num_experts_per_tok", low=1, high=1024, **default),
        d_ff=width,
        activation=activation(c, "hidden_act", "silu"),
        d_shared=width * c.integer("n_shared_experts", low=1, high=1024, default=n_shared),
        **options,
    )


def model(
    c: Config,
    head: str,
    config: ExpertsConfig,
    *,
    n_dense: int,
    max_len: int,
    interleaved: bool = True,
) -> LanguageModel:
    """Return a decoder of latent attention and experts. The first layers have a dense network.

    n_dense, max_len: the family's values if the configuration has no such key
    """
    c.ignore("pretraining_tp", "output_router_logits")
    c.ignore("qk_head_dim")  # transformers computes it from other keys
    c.unread("ep_size", 1)
    c.unread("moe_layer_freq", 1)
    c.ignore("aux_loss_alpha", "seq_aux")  # of the loss in DeepSeek's own training
    d_rope = c.integer("qk_rope_head_dim", low=2, default=64)
    c.ignore("head_dim")  # RoPE of transformers reads it, and null means another width there
    if c.data.get("head_dim", d_rope) != d_rope:
        raise c.refused("head_dim", str(d_rope))
    rotary = rope(c, width=d_rope, max_len=max_len, theta=THETA)
    rotary = replace(rotary, interleaved=interleaved)
    attn = attention(c, rotary)
    n_dense = c.integer("first_k_dense_replace", default=n_dense)
    eps = NormConfig("rms", c.number("rms_norm_eps", low=0, default=1e-6))
    dense, sparse = (BlockConfig(attn, ffn, eps) for ffn in (llama.gated(c), config))
    blocks = tuple(dense if i < n_dense else sparse for i in range(layers(c)))
    return llama.decoder(c, head, blocks, rotary=rotary)


def attention(c: Config, rotary: RopeConfig) -> LatentAttentionConfig:
    """Return the latent attention. mscale_all_dim of YaRN changes the scale of the scores."""
    heads = c.integer("num_attention_heads", low=1)
    c.only("num_key_value_heads", heads, None)
    config = LatentAttentionConfig(
        d_model=c.integer("hidden_size", low=1),
        n_heads=heads,
        kv_rank=c.integer("kv_lora_rank", low=1, default=512),
        d_nope=c.integer("qk_nope_head_dim", low=1, default=128),
        d_rope=rotary.width,
        d_value=c.integer("v_head_dim", low=1, default=128),
        q_rank=c.integer("q_lora_rank", low=1, default=1536, null=None),
        bias=c.flag("attention_bias", default=False),
        dropout=rate(c, "attention_dropout", 0.0),
    )
    if not rotary.mscale_all_dim:
        return config
    growth = 1 + 0.1 * rotary.mscale_all_dim * math.log(max(rotary.stretch, 1.0))
    return replace(config, scale=config.head_width**-0.5 * growth**2)


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`)."""
    yield from norm(f"{theirs}.input_layernorm", f"{ours}.attn_norm")
    yield from attention_links(f"{theirs}.self_attn", f"{ours}.attn")
    yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm")
    mlp, ffn = f"{theirs}.mlp", f"{ours}.ffn"
    yield from llama.feed_forward_links(mlp, ffn)
    yield from mixture_links(mlp, ffn, config, PARTS)
    yield from same(f"{mlp}.gate.e_score_correction_bias", f"{ffn}.correction")
    yield from llama.feed_forward_links(f"{mlp}.shared_experts", f"{ffn}.shared")


def attention_links(theirs: str, ours: str) -> Links:
    """Yield the links of latent attention."""
    for name, leaf in (
        ("q_proj", "q"),
        ("q_a_proj", "q.down"),
        ("q_b_proj", "q.up"),
        ("kv_a_proj_with_mqa", "kv.down"),
        ("kv_b_proj", "kv.up"),
        ("o_proj", "o"),
    ):
        yield from linear(f"{theirs}.{name}", f"{ours}.{leaf}")
    yield from norm(f"{theirs}.q_a_layernorm", f"{ours}.q.norm")
    yield from norm(f"{theirs}.kv_a_layernorm", f"{ours}.kv.norm")


DEEPSEEK_V2 = llama.family(
    "DeepseekV2",
    build_v2,
    layer_links,
    in_memory=links_in_memory,
    aliases={"num_experts": "n_routed_experts"},
)
DEEPSEEK_V3 = llama.family(
    "DeepseekV3",
    build_v3,
    layer_links,
    in_memory=links_in_memory,
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    unused=(r"(model\.)?layers\.61\..*",),  # of V3, which predict the token after the next one
)
