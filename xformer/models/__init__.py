"""Whole networks. A model is a frozen configuration with `init`, `forward` and `loss`."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.models.discriminator import Discriminator, DiscriminatorParams
    from xformer.models.encoder_decoder import EncoderDecoder, EncoderDecoderParams
    from xformer.models.gpt import GPT
    from xformer.models.heads import (
        Classifier,
        ClassifierParams,
        Head,
        MaskedLMHead,
        MaskedLMHeadParams,
        Pooler,
        TokenClassifier,
        TokenClassifierParams,
    )
    from xformer.models.language_model import LanguageModel, LanguageModelParams
    from xformer.models.lm_head import LMHead
    from xformer.models.segment_memory import SegmentMemory
    from xformer.models.transformer import Transformer

__all__ = [
    "GPT",
    "Classifier",
    "ClassifierParams",
    "Discriminator",
    "DiscriminatorParams",
    "EncoderDecoder",
    "EncoderDecoderParams",
    "Head",
    "LMHead",
    "LanguageModel",
    "LanguageModelParams",
    "MaskedLMHead",
    "MaskedLMHeadParams",
    "Pooler",
    "SegmentMemory",
    "TokenClassifier",
    "TokenClassifierParams",
    "Transformer",
]

later(
    __name__,
    discriminator="Discriminator DiscriminatorParams",
    encoder_decoder="EncoderDecoder EncoderDecoderParams",
    gpt="GPT",
    heads=(
        "Classifier ClassifierParams Head MaskedLMHead MaskedLMHeadParams Pooler TokenClassifier "
        "TokenClassifierParams"
    ),
    language_model="LanguageModel LanguageModelParams",
    lm_head="LMHead",
    segment_memory="SegmentMemory",
    transformer="Transformer",
)
