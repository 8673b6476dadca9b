"""Whole networks: a frozen configuration with `init`, `forward` and `loss`."""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from xformer.models.encoder_decoder import EncoderDecoder, EncoderDecoderParams
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

# Imported when first asked for: a language model starts without.
_LATER = {
    "EncoderDecoder": "encoder_decoder",
    "EncoderDecoderParams": "encoder_decoder",
    "Transformer": "transformer",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    if name in _LATER.values():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
