"""MPNet (arXiv:2004.09297): RoBERTa without token types, with the relative bias of T5."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from xformer.layers import RelativeConfig
from xformer.models import Classifier, LanguageModel, MaskedLMHead, TokenClassifier
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert, roberta
from xformer.pretrained.family import Family
from xformer.pretrained.names import Links, attention, linear, norm, same


def build(c: Config, head: str, names: Collection[str] | None) -> LanguageModel:
    """Return the model of a configuration.

    head: "masked-lm", "classifier", "token_classifier", or "hidden", a model without a head
    names: of the file's tensors; None: unknown. A "hidden" model has a pooler if a name contains
        "pooler.", and if names is None.
    """
    config = bert.block(c)
    top: Any = bert.pooler(names)
    if head == "masked-lm":
        top = MaskedLMHead("gelu", config.norm.eps)
    elif head == "classifier":
        top = Classifier(c.labels(), dense_dropout=config.dropout, dropout=config.dropout)
    elif head == "token_classifier":
        top = TokenClassifier(c.labels(), dropout=config.dropout)
    # transformers reads neither: positions begin at 2, and there are always 32 buckets.
    c.only("relative_attention_num_buckets", 32)
    model = bert.encoder(c, config, top, vocab_size=30527, offset=2, n_types=0)
    return replace(model, relative_bias=RelativeConfig(config.attn.n_heads))


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from bert.embed_links("mpnet.embeddings")
    yield from same("mpnet.encoder.relative_attention_bias.weight", "stack.relative_bias")
    for i in range(len(model.blocks)):
        theirs, ours = f"mpnet.encoder.layer.{i}", f"stack.blocks.{i}"
        yield from attention(f"{theirs}.attention.attn", f"{ours}.attn", "q", "k", "v", "o")
        yield from norm(f"{theirs}.attention.LayerNorm", f"{ours}.attn_norm")
        yield from linear(f"{theirs}.intermediate.dense", f"{ours}.ffn.up")
        yield from linear(f"{theirs}.output.dense", f"{ours}.ffn.down")
        yield from norm(f"{theirs}.output.LayerNorm", f"{ours}.ffn_norm")
    yield from roberta.head_links(model, "mpnet")


FAMILY = Family(
    heads={
        "MPNetForMaskedLM": "masked-lm",
        "MPNetForSequenceClassification": "classifier",
        "MPNetForTokenClassification": "token_classifier",
        "MPNetModel": "hidden",
    },
    build=build,
    links=links,
    prefix="mpnet.",
    tied={
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    buffers=bert.FAMILY.buffers,
    unused=(r"mpnet\.pooler\..*",),
)
