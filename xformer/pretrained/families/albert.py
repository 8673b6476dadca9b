"""ALBERT (arXiv:1909.11942): BERT with a narrow embedding and layers that share parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from xformer.models import Classifier, LanguageModel, MaskedLMHead, TokenClassifier
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert
from xformer.pretrained.family import Family, rate
from xformer.pretrained.names import Links, attention, linear, norm, same


def build(c: Config, head: str, names: Collection[str] | None) -> LanguageModel:
    """Return the model of a configuration.

    head: "masked-lm", "classifier", "token_classifier", or "hidden", a model without a head
    names: of the file's tensors; None: unknown. A "hidden" model has a pooler if a name contains
        "pooler.", and if names is None.
    """
    c.only("inner_group_num", 1)
    c.ignore("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    config = bert.block(c, act="gelu_new", dropout=0.0, sizes=(4096, 64, 16384))
    top: Any = bert.pooler(names)
    if head == "masked-lm":
        top = MaskedLMHead(config.ffn.activation, config.norm.eps)
    elif head == "classifier":
        top = Classifier(c.labels(), dropout=rate(c, "classifier_dropout_prob", 0.1))
    elif head == "token_classifier":
        top = TokenClassifier(c.labels(), dropout=rate(c, "classifier_dropout_prob", 0.1))
    model = bert.encoder(
        c,
        config,
        top,
        vocab_size=30000,
        width=c.integer("embedding_size", low=1, default=128),
        project=True,
        project_bias=True,
    )
    groups = c.integer("num_hidden_groups", low=1, default=1)
    if len(model.blocks) % groups:
        raise c.refused("num_hidden_groups", f"a divisor of {len(model.blocks)} layers")
    return replace(model, n_shared_layer_groups=groups)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from bert.embed_links("albert.embeddings")
    yield from linear("albert.encoder.embedding_hidden_mapping_in", "embed.project")
    for i in range(model.n_shared_layer_groups or 0):
        group = f"albert.encoder.albert_layer_groups.{i}"
        theirs, ours = f"{group}.albert_layers.0", f"stack.blocks.{i}"
        yield from attention(
            f"{theirs}.attention", f"{ours}.attn", "query", "key", "value", "dense"
        )
        yield from norm(f"{theirs}.attention.LayerNorm", f"{ours}.attn_norm")
        yield from linear(f"{theirs}.ffn", f"{ours}.ffn.up")
        yield from linear(f"{theirs}.ffn_output", f"{ours}.ffn.down")
        yield from norm(f"{theirs}.full_layer_layer_norm", f"{ours}.ffn_norm")
    if isinstance(model.head, MaskedLMHead):
        yield from linear("predictions.dense", "head.dense")
        yield from norm("predictions.LayerNorm", "head.norm")
        yield from same("predictions.bias", "head.b")
    elif isinstance(model.head, Classifier):
        yield from linear("albert.pooler", "head.dense")
        yield from linear("classifier", "head.out")
    elif isinstance(model.head, TokenClassifier):
        yield from linear("classifier", "head.out")
    else:
        yield from linear("albert.pooler", "head")


FAMILY = Family(
    heads={
        "AlbertForMaskedLM": "masked-lm",
        "AlbertForSequenceClassification": "classifier",
        "AlbertForTokenClassification": "token_classifier",
        "AlbertModel": "hidden",
    },
    build=build,
    links=links,
    prefix="albert.",
    tied={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    buffers=bert.FAMILY.buffers,
    # The sentence-order head of ALBERT's pretraining, and the pooler that it reads.
    unused=(r"sop_classifier\..*", r"albert\.pooler\..*"),
)
