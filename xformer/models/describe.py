"""What a model is, in the words of error messages."""

from __future__ import annotations

from typing import Any

from xformer.models.discriminator import Discriminator
from xformer.models.encoder_decoder import EncoderDecoder
from xformer.models.heads import Classifier, MaskedLMHead, Pooler, TokenClassifier
from xformer.models.language_model import LanguageModel
from xformer.models.lm_head import LMHead


def in_words(model: Any) -> str:
    """A model's kind and architecture: "a masked language model (BertForMaskedLM)".

    For other objects the beginning of their repr.
    """
    if not isinstance(model, EncoderDecoder | LanguageModel):
        return f"{model!r:.60}"
    names = (model.hf_config or {}).get("architectures") or [""]
    return f"{_kind(model)} ({names[0]})" if names[0] else _kind(model)


def _kind(model: EncoderDecoder | LanguageModel) -> str:
    if isinstance(model, EncoderDecoder):
        return f"an encoder-decoder{'' if model.head is not None else ' without a head'}"
    if isinstance(model.head, Classifier):
        n = model.head.n_labels
        return f"a classifier of {n} {'class' if n == 1 else 'classes'}"
    if isinstance(model.head, TokenClassifier):
        n = model.head.n_labels
        return f"a token classifier of {n} {'label' if n == 1 else 'labels'}"
    if isinstance(model.head, Discriminator):
        return "a discriminator of replaced tokens"
    if isinstance(model.head, LMHead):
        return "a causal language model" if model.causal else "a language model that is not causal"
    if isinstance(model.head, MaskedLMHead):
        return "a masked language model"
    kind = "a decoder" if model.causal else "an encoder"
    return f"{kind} with a pooler" if isinstance(model.head, Pooler) else f"{kind} without a head"
