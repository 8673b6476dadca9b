"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases of queries, keys and values."""

from __future__ import annotations

from xformer.layers import BlockConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    c.unread("use_mrope", False)  # position ids of images
    blocks = sliding(c, llama.block(c, kv_heads=32, qkv_bias=True))
    return llama.decoder(c, head, blocks, max_len=32768)


def sliding(c: Config, config: BlockConfig) -> tuple[BlockConfig, ...]:
    """Return the blocks of all layers: `config` with the layer's sliding window or None.

    If `use_sliding_window` is true, by default layers from `max_window_layers` on have a window.
    """
    size = llama.window(c, default=4096)
    size = size if c.flag("use_sliding_window", default=False) else None
    first = c.integer("max_window_layers", default=28)
    sizes = llama.windows(c, size, lambda i: size is not None and i >= first)
    return llama.windowed(config, sizes)


FAMILY = llama.family("Qwen2", build)
