"""Generating text with a model: prompts read once, then one token after another."""

from xformer.generation import samplers
from xformer.generation.generate import generate, sample, stream
from xformer.generation.prefix import Prefix, prefill

__all__ = ["Prefix", "generate", "prefill", "sample", "samplers", "stream"]
