"""Whole networks. A model is a frozen configuration with `init`, `forward` and `loss`."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.models.discriminator import Discriminator as Discriminator
    from xformer.models.discriminator import DiscriminatorParams as DiscriminatorParams
    from xformer.models.encoder_decoder import EncoderDecoder as EncoderDecoder
    from xformer.models.encoder_decoder import EncoderDecoderParams as EncoderDecoderParams
    from xformer.models.gpt import GPT as GPT
    from xformer.models.heads import Classifier as Classifier
    from xformer.models.heads import ClassifierParams as ClassifierParams
    from xformer.models.heads import Head as Head
    from xformer.models.heads import MaskedLMHead as MaskedLMHead
    from xformer.models.heads import MaskedLMHeadParams as MaskedLMHeadParams
    from xformer.models.heads import Pooler as Pooler
    from xformer.models.heads import TokenClassifier as TokenClassifier
    from xformer.models.heads import TokenClassifierParams as TokenClassifierParams
    from xformer.models.language_model import LanguageModel as LanguageModel
    from xformer.models.language_model import LanguageModelParams as LanguageModelParams
    from xformer.models.lm_head import LMHead as LMHead
    from xformer.models.segment_memory import SegmentMemory as SegmentMemory
    from xformer.models.transformer import Transformer as Transformer

later(__name__)
