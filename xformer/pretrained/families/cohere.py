"""Cohere's Command R: attention and feed-forward side by side, after one norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.layers import BlockConfig, NormConfig, RopeConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import layers
from xformer.pretrained.rope import rope

MAX_LEN = 8192
HEADS = ("ForCausalLM", "Model")


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    c.only("use_qk_norm", False)
    c.unread("pretraining_tp", 1)
    c.unread("model_max_length", c.data.get("model_max_length"))
    config = side_by_side(c)
    return tied(c, head, (config,) * layers(c), rotary=interleaved(c, config, 500000.0))


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
    max_len = c.integer("max_position_embeddings", low=1, default=MAX_LEN)
    turned = rope(c, width=config.attn.head_width, max_len=max_len, theta=theta)
    return replace(turned, interleaved=True)


def tied(c: Config, head: str, blocks: tuple[BlockConfig, ...], *, rotary: Any) -> LanguageModel:
    """Return a decoder whose logits are scaled. By default its head is tied."""
    scale = c.number("logit_scale", default=0.0625)
    return llama.decoder(
        c, head, blocks, max_len=MAX_LEN, tied=True, logit_scale=scale, rotary=rotary
    )


FAMILY = llama.family("Cohere", build, heads=HEADS)
