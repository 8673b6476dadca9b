"""Mistral (arXiv:2310.06825): Llama with a sliding window."""

from __future__ import annotations

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import layers


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    config = llama.block(c, kv_heads=8, window=llama.window(c, default=4096))
    return llama.decoder(c, head, (config,) * layers(c), max_len=131072)


FAMILY = llama.family("Mistral", build)
