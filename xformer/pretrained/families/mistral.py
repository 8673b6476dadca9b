"""Mistral (arXiv:2310.06825): Llama with a sliding window."""

from __future__ import annotations

from collections.abc import Collection

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families.llama import block, decoder, family, window
from xformer.pretrained.family import layers


def build(c: Config, head: str, names: Collection[str] | None) -> LanguageModel:
    """Return the model of a configuration."""
    config = block(c, kv_heads=8, window=window(c, default=4096))
    return decoder(c, head, (config,) * layers(c), max_len=131072)


FAMILY = family("Mistral", build)
