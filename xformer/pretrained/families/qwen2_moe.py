"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): Qwen2 with experts, one of them shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.layers import BlockConfig, ExpertsConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.families.mixtral import balancing, links_in_memory, mixture_links
from xformer.pretrained.family import activation
from xformer.pretrained.names import Link, Links

PARTS = (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down"))


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    size = c.integer("shared_expert_intermediate_size", low=1, default=5632)
    d_ff = c.integer("moe_intermediate_size", low=1, default=1408)
    mixture = experts(c, 60, 4, d_ff, d_shared=size, shared_gate=True)
    qkv_bias = c.flag("qkv_bias", default=True)
    config = llama.block(c, kv_heads=16, qkv_bias=qkv_bias, ffn=mixture)
    blocks = sparse(c, sliding(c, config))
    return llama.decoder(c, head, blocks, max_len=32768, load_balancing_weight=balancing(c, head))


def experts(
    c: Config, n_experts: int, top_k: int, d_ff: int, key: str = "num_experts", **options: Any
) -> ExpertsConfig:
    """Return the mixture of a layer.

    n_experts, top_k: the family's defaults
    key: the name of the number of experts
    """
    return ExpertsConfig(
        n_experts=c.integer(key, low=1, high=1024, default=n_experts),
        top_k=c.integer("num_experts_per_tok", low=1, high=1024, default=top_k),
        d_ff=d_ff,
        normalise=c.flag("norm_topk_prob", default=False),
        activation=activation(c, "hidden_act", "silu"),
        **options,
    )


def sparse(c: Config, blocks: tuple[BlockConfig, ...]) -> tuple[BlockConfig, ...]:
    """Return the blocks, with a dense network in place of the experts in some.

    Each layer whose number, counted from 1, `decoder_sparse_step` divides has experts, unless
    `mlp_only_layers` has its index, counted from 0.
    """
    step = c.integer("decoder_sparse_step", low=1, default=1)
    only = c.integers("mlp_only_layers", default=(), null=())
    dense = llama.gated(c)
    return tuple(
        replace(config, ffn=dense) if i in only or (i + 1) % step else config
        for i, config in enumerate(blocks)
    )


def sliding(c: Config, config: BlockConfig) -> tuple[BlockConfig, ...]:
    """Return the blocks of all layers: `config` with the layer's sliding window or None.

    If `use_sliding_window` is true, by default every second layer below `max_window_layers` has a
    window, from the first.
    """
    size = None
    c.ignore("sliding_window")  # transformers writes 0 if no layer has a window
    if c.flag("use_sliding_window", default=False):
        size = llama.window(c, default=4096)
    last = c.integer("max_window_layers", default=28)
    sizes = llama.windows(c, size, lambda i: size is not None and i % 2 == 0 and i < last)
    return llama.windowed(config, sizes)


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`).

    A layer has experts or a dense network; Qwen2-MoE's experts include a shared one.
    """
    yield from llama.block_links(theirs, ours)
    mlp, ffn = f"{theirs}.mlp", f"{ours}.ffn"
    yield from llama.feed_forward_links(mlp, ffn)
    yield from mixture_links(mlp, ffn, config, PARTS)
    yield from llama.feed_forward_links(f"{mlp}.shared_expert", f"{ffn}.shared")
    yield Link((f"{mlp}.shared_expert_gate.weight",), (f"{ffn}.shared_gate",), flip=True)


FAMILY = llama.family("Qwen2Moe", build, layer_links, in_memory=links_in_memory)
