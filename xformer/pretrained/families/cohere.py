"""Cohere's Command R, and Command R7B and Command A (arXiv:2504.00698).

Attention and feed-forward are side by side, after one norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.layers import BlockConfig, NormConfig, RopeConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import layers
from xformer.pretrained.rope import rope

HEADS = ("ForCausalLM", "Model")
UNREAD = {  # keys of Command R7B, which describe the family
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    **dict.fromkeys(("use_embedding_sharing", "use_gated_activation"), True),
    **dict.fromkeys(("use_parallel_block", "use_parallel_embedding"), True),
}


def build(c: Config, head: str) -> LanguageModel:
    """Return a Command R."""
    c.only("use_qk_norm", False)
    c.unread("pretraining_tp", 1)
    c.unread("model_max_length", c.data.get("model_max_length"))
    config = side_by_side(c)
    return tied(c, head, (config,) * layers(c), rotary=interleaved(c, config, 500000.0))


def build_2(c: Config, head: str) -> LanguageModel:
    """Return a Command R7B or a Command A.

    By default each fourth layer attends to all tokens, without RoPE. The others have a window.
    """
    for name, value in UNREAD.items():
        c.unread(name, value)
    config = side_by_side(c)
    each = c.integer("sliding_window_pattern", low=1, default=4)
    sizes = llama.windows(c, llama.window(c, default=4096), lambda i: (i + 1) % each != 0)
    turned = interleaved(c, config, 10000.0)
    rotary = tuple(None if size is None else turned for size in sizes)
    return tied(c, head, llama.windowed(config, sizes), rotary=rotary)


def side_by_side(c: Config) -> BlockConfig:
    """Return a block with LayerNorm without a bias: x + attn(norm(x)) + ffn(norm(x))."""
    return BlockConfig(
        llama.attend(c, bias=c.flag("attention_bias", default=False)),
        llama.gated(c),
        NormConfig(eps=c.number("layer_norm_eps", low=0, default=1e-5), bias=False),
        parallel=True,
        shared_norm=True,
    )


def interleaved(c: Config, config: BlockConfig, theta: float) -> RopeConfig:
    """Return RoPE of the pairs of channels (2i, 2i + 1). theta: the family's default base."""
    turned = rope(c, width=config.attn.head_width, max_len=8192, theta=theta)
    return replace(turned, interleaved=True)


def tied(c: Config, head: str, blocks: tuple[BlockConfig, ...], *, rotary: Any) -> LanguageModel:
    """Return a decoder whose logits are scaled. By default its head is tied."""
    scale = c.number("logit_scale", default=0.0625)
    return llama.decoder(c, head, blocks, tied=True, logit_scale=scale, rotary=rotary)


COHERE = llama.family("Cohere", build, heads=HEADS)
COHERE2 = llama.family("Cohere2", build_2, heads=HEADS)
