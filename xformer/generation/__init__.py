"""Generating tokens from a language model."""

from xformer.generation.sample import sample

__all__ = ["sample"]
