"""Qwen2, Qwen2.5 and Qwen2-MoE (arXiv:2407.10671), Qwen3 and Qwen3-MoE (arXiv:2505.09388)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.layers import BlockConfig, ExpertsConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.families.mistral import ALIASES, balancing, links_in_memory, mixture_links
from xformer.pretrained.family import activation, layers
from xformer.pretrained.names import Link, Links

PARTS = (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down"))


def build_2(c: Config, head: str) -> LanguageModel:
    """Return a Qwen2: Llama with biases of queries, keys and values."""
    c.unread("use_mrope", False)  # position ids of images
    blocks = sliding(c, llama.block(c, kv_heads=32, qkv_bias=True))
    return llama.decoder(c, head, blocks, max_len=32768)


def build_3(c: Config, head: str) -> LanguageModel:
    """Return a Qwen3: Qwen2 with a norm of each head's queries and keys."""
    bias = c.flag("attention_bias", default=False)
    config = llama.block(c, kv_heads=32, d_head=128, bias=bias, qk_norm="head")
    return llama.decoder(c, head, sliding(c, config), max_len=32768)


def sliding(c: Config, config: BlockConfig) -> tuple[BlockConfig, ...]:
    """Return the blocks of all layers: `config` with the layer's sliding window or None.

    If `use_sliding_window` is true, by default layers from `max_window_layers` on have a window.
    """
    size = llama.window(c, default=4096)
    size = size if c.flag("use_sliding_window", default=False) else None
    first = c.integer("max_window_layers", default=28)
    sizes = llama.windows(c, size, lambda i: size is not None and i >= first)
    return llama.windowed(config, sizes)


def build_2_moe(c: Config, head: str) -> LanguageModel:
    """Return a Qwen2-MoE or Qwen1.5-MoE: Qwen2 with experts, one of them shared.

    If `use_sliding_window` is true, by default every second layer below `max_window_layers` has a
    window, from the first.
    """
    size = c.integer("shared_expert_intermediate_size", low=1, default=5632)
    d_ff = c.integer("moe_intermediate_size", low=1, default=1408)
    mixture = experts(c, 60, 4, d_ff, d_shared=size, shared_gate=True)
    qkv_bias = c.flag("qkv_bias", default=True)
    config = llama.block(c, kv_heads=16, qkv_bias=qkv_bias, ffn=mixture)
    local = window_if_used(c)
    last = c.integer("max_window_layers", default=28)
    sizes = llama.windows(c, local, lambda i: local is not None and i % 2 == 0 and i < last)
    blocks = sparse(c, llama.windowed(config, sizes))
    return llama.decoder(c, head, blocks, max_len=32768, load_balancing_weight=balancing(c, head))


def build_3_moe(c: Config, head: str) -> LanguageModel:
    """Return a Qwen3-MoE: Qwen3 with experts, none of them shared.

    With `use_sliding_window`, all layers have a window.
    """
    c.ignore("max_window_layers")  # it is in files; nothing reads it
    bias = c.flag("attention_bias", default=False)
    d_ff = c.integer("moe_intermediate_size", low=1, default=768)
    mixture = experts(c, 128, 8, d_ff, key="num_local_experts")
    size = window_if_used(c)
    config = llama.block(c, kv_heads=4, bias=bias, qk_norm="head", window=size, ffn=mixture)
    blocks = sparse(c, (config,) * layers(c))
    return llama.decoder(c, head, blocks, max_len=32768, load_balancing_weight=balancing(c, head))


def window_if_used(c: Config) -> Any:
    """Return the window if `use_sliding_window` is true; None if not."""
    c.ignore("sliding_window")  # transformers writes 0 if no layer has a window
    return llama.window(c, default=4096) if c.flag("use_sliding_window", default=False) else None


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


QWEN2 = llama.family("Qwen2", build_2)
QWEN2_MOE = llama.family("Qwen2Moe", build_2_moe, layer_links, in_memory=links_in_memory)
QWEN3 = llama.family("Qwen3", build_3)
QWEN3_MOE = llama.family(
    "Qwen3Moe", build_3_moe, layer_links, in_memory=links_in_memory, aliases=ALIASES
)
