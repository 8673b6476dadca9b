"""Whole networks: a frozen configuration with `init`, `forward` and `loss`."""

from xformer.models.encoder_decoder import EncoderDecoder, EncoderDecoderParams
from xformer.models.gpt import GPT
from xformer.models.heads import (
    Classifier,
    ClassifierParams,
    LMHead,
    MaskedLMHead,
    MaskedLMHeadParams,
    Pooler,
)
from xformer.models.language_model import LanguageModel, LanguageModelParams
from xformer.models.transformer import Transformer

__all__ = [
    "GPT",
    "Classifier",
    "ClassifierParams",
    "EncoderDecoder",
    "EncoderDecoderParams",
    "LMHead",
    "LanguageModel",
    "LanguageModelParams",
    "MaskedLMHead",
    "MaskedLMHeadParams",
    "Pooler",
    "Transformer",
]
