"""DistilBERT (arXiv:1910.01108): a smaller BERT, without token types and pooler."""

from __future__ import annotations

from typing import Any

from xformer.layers import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from xformer.models import Classifier, LanguageModel, MaskedLMHead, TokenClassifier
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert
from xformer.pretrained.family import Family, activation, embedding, encoder_heads, layers, rate
from xformer.pretrained.names import Links, attention, linear, norm

EPS = 1e-12


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. head: one of `FAMILY.heads`."""
    if head == "masked-lm":
        c.only("tie_word_embeddings", True)
    c.ignore("tie_weights_", "tie_word_embeddings", "qa_dropout")
    c.ignore("sinusoidal_pos_embds")  # the initial values of the learned positions
    c.ignore("is_causal")  # only decoders use it
    attn = AttentionConfig(
        d_model=c.integer("dim", low=1, default=768),
        n_heads=c.integer("n_heads", low=1, default=12),
        dropout=rate(c, "attention_dropout", 0.1),
    )
    ffn = FeedForwardConfig(
        d_ff=c.integer("hidden_dim", low=1, default=3072),
        activation=activation(c, "activation", "gelu"),
    )
    block = BlockConfig(attn, ffn, NormConfig(eps=EPS), "post", dropout=rate(c, "dropout", 0.1))
    max_len = c.integer("max_position_embeddings", low=1, default=512)
    around: dict[str, Any] = {"norm": block.norm, "dropout": block.dropout}
    embed = embedding(c, block.d_model, 30522, max_len=max_len, positions="learned", **around)
    top: Any = None
    last = rate(c, "seq_classif_dropout", 0.2)
    if head == "masked-lm":
        top = MaskedLMHead(ffn.activation, EPS)
    elif head == "classifier":
        top = Classifier(c.labels(), dense="relu", dropout=last)
    elif head == "token_classifier":
        top = TokenClassifier(c.labels(), dropout=block.dropout)
    return LanguageModel(embed, (block,) * layers(c, "n_layers", 6), causal=False, head=top)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from bert.embed_links("distilbert.embeddings")
    for i in range(len(model.blocks)):
        theirs, ours = f"distilbert.transformer.layer.{i}", f"stack.blocks.{i}"
        names = "q_lin", "k_lin", "v_lin", "out_lin"
        yield from attention(f"{theirs}.attention", f"{ours}.attn", *names)
        yield from norm(f"{theirs}.sa_layer_norm", f"{ours}.attn_norm")
        yield from linear(f"{theirs}.ffn.lin1", f"{ours}.ffn.up")
        yield from linear(f"{theirs}.ffn.lin2", f"{ours}.ffn.down")
        yield from norm(f"{theirs}.output_layer_norm", f"{ours}.ffn_norm")
    masked = "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"
    yield from bert.head_links(model, masked, ("pre_classifier", "classifier"))


FAMILY = Family(
    heads=encoder_heads("DistilBert"),
    build=build,
    links=links,
    prefix="distilbert.",
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    buffers=(r".*embeddings\.position_ids",),
)
