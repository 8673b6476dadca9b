"""Whole networks: a frozen configuration with `init`, `forward` and `loss`."""

from xformer.models.gpt import GPT, GPTParams
from xformer.models.transformer import Transformer, TransformerParams

__all__ = ["GPT", "GPTParams", "Transformer", "TransformerParams"]
