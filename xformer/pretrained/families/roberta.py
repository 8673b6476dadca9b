"""RoBERTa (arXiv:1907.11692): BERT with other heads. Position ids begin after the padding id."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from xformer.models import Classifier, LanguageModel, MaskedLMHead, TokenClassifier
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert
from xformer.pretrained.family import Family
from xformer.pretrained.names import Links, linear, norm, same


def build(c: Config, head: str, names: Collection[str] | None, *, vocab_size: int) -> LanguageModel:
    """Return the model of a configuration.

    head: "masked-lm", "classifier", "token_classifier", or "hidden", a model without a head
    names: of the file's tensors; None: unknown. A "hidden" model has a pooler if a name contains
        "pooler.", and if names is None.
    vocab_size: the family's default
    """
    config = bert.block(c)
    top: Any = bert.pooler(names)
    if head == "masked-lm":
        top = MaskedLMHead("gelu", config.norm.eps)
    elif head == "classifier":
        rate = bert.classifier_dropout(c, config)
        top = Classifier(c.labels(), dense_dropout=rate, dropout=rate)
    elif head == "token_classifier":
        top = TokenClassifier(c.labels(), dropout=bert.classifier_dropout(c, config))
    offset = c.integer("pad_token_id", default=1) + 1
    return bert.encoder(c, config, top, vocab_size=vocab_size, offset=offset)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from bert.encoder_links(model, "roberta")
    yield from head_links(model, "roberta")


def head_links(model: LanguageModel, name: str) -> Links:
    """Yield the links of the head. name: the prefix of a pooler."""
    if isinstance(model.head, MaskedLMHead):
        yield from linear("lm_head.dense", "head.dense")
        yield from norm("lm_head.layer_norm", "head.norm")
        yield from same("lm_head.bias", "head.b")
    elif isinstance(model.head, Classifier):
        yield from linear("classifier.dense", "head.dense")
        yield from linear("classifier.out_proj", "head.out")
    elif isinstance(model.head, TokenClassifier):
        yield from linear("classifier", "head.out")
    else:
        yield from linear(f"{name}.pooler.dense", "head")


def family(name: str, *, vocab_size: int) -> Family:
    """Return the family whose architectures have names that begin with `name`.

    vocab_size: its default
    """
    return Family(
        heads={
            f"{name}ForMaskedLM": "masked-lm",
            f"{name}ForSequenceClassification": "classifier",
            f"{name}ForTokenClassification": "token_classifier",
            f"{name}Model": "hidden",
        },
        build=partial(build, vocab_size=vocab_size),
        links=links,
        prefix="roberta.",
        tied={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        buffers=bert.FAMILY.buffers,
        unused=(r"roberta\.pooler\..*",),
    )


FAMILY = family("Roberta", vocab_size=50265)
