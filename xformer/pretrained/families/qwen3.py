"""Qwen3 (arXiv:2505.09388): Qwen2 with a norm of each head's queries and keys."""

from __future__ import annotations

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.families.qwen2 import sliding


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    bias = c.flag("attention_bias", default=False)
    config = llama.block(c, kv_heads=32, d_head=128, bias=bias, qk_norm="head")
    return llama.decoder(c, head, sliding(c, config), max_len=32768)


FAMILY = llama.family("Qwen3", build)
