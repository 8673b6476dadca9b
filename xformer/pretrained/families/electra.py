"""ELECTRA (arXiv:2003.10555): BERT with a narrow embedding and heads of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from xformer.models import (
    Classifier,
    Discriminator,
    LanguageModel,
    MaskedLMHead,
    TokenClassifier,
)
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert
from xformer.pretrained.family import Family
from xformer.pretrained.names import Links, linear, norm, same


def build(c: Config, head: str, names: Collection[str] | None) -> LanguageModel:
    """Return the model of a configuration.

    head: "masked-lm" (the generator), "discriminator", "classifier", "token_classifier", or
        "hidden", a model without a head or pooler
    names: not used
    """
    summary = ("activation", "first_dropout", "last_dropout", "proj_to_labels", "type", "use_proj")
    c.ignore(*(f"summary_{key}" for key in summary))  # of multiple choice
    config = bert.block(c, sizes=(256, 4, 1024))
    top: Any = None
    if head == "masked-lm":
        top = MaskedLMHead("gelu", config.norm.eps)
    elif head == "discriminator":
        top = Discriminator(config.ffn.activation)
    elif head == "classifier":
        rate = bert.classifier_dropout(c, config)
        top = Classifier(c.labels(), dense="gelu", dense_dropout=rate, dropout=rate)
    elif head == "token_classifier":
        top = TokenClassifier(c.labels(), dropout=bert.classifier_dropout(c, config))
    width = c.integer("embedding_size", low=1, default=128)
    return bert.encoder(c, config, top, width=width, project_bias=True)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from linear("electra.embeddings_project", "embed.project")
    if isinstance(model.head, MaskedLMHead):
        yield from linear("generator_predictions.dense", "head.dense")
        yield from norm("generator_predictions.LayerNorm", "head.norm")
        yield from same("generator_lm_head.bias", "head.b")
    elif isinstance(model.head, Discriminator):
        yield from linear("discriminator_predictions.dense", "head.dense")
        yield from linear("discriminator_predictions.dense_prediction", "head.out")
    elif isinstance(model.head, Classifier):
        yield from linear("classifier.dense", "head.dense")
        yield from linear("classifier.out_proj", "head.out")
    else:
        yield from linear("classifier", "head.out")
    yield from bert.encoder_links(model, "electra")


FAMILY = Family(
    heads={
        "ElectraForMaskedLM": "masked-lm",
        "ElectraForPreTraining": "discriminator",
        "ElectraForSequenceClassification": "classifier",
        "ElectraForTokenClassification": "token_classifier",
        "ElectraModel": "hidden",
    },
    build=build,
    links=links,
    prefix="electra.",
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    buffers=bert.FAMILY.buffers,
)
