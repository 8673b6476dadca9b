"""ALBERT (arXiv:1909.11942): BERT with a narrow embedding and layers that share parameters."""

from __future__ import annotations

from dataclasses import replace

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert
from xformer.pretrained.names import Links, attention, linear, norm


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. head: one of `FAMILY.heads`."""
    c.only("inner_group_num", 1)
    c.ignore("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    config = bert.block(c, act="gelu_new", dropout=0.0, sizes=(4096, 64, 16384))
    key = "classifier_dropout_prob"
    model = bert.encoder(
        c,
        config,
        bert.head_of(c, head, config, key=key, default=0.1, bare=bert.pooler(c)),
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
        names = "query", "key", "value", "dense"
        yield from attention(f"{theirs}.attention", f"{ours}.attn", *names)
        yield from norm(f"{theirs}.attention.LayerNorm", f"{ours}.attn_norm")
        yield from linear(f"{theirs}.ffn", f"{ours}.ffn.up")
        yield from linear(f"{theirs}.ffn_output", f"{ours}.ffn.down")
        yield from norm(f"{theirs}.full_layer_layer_norm", f"{ours}.ffn_norm")
    masked = "predictions.dense", "predictions.LayerNorm", "predictions.bias"
    yield from bert.head_links(model, masked, ("albert.pooler", "classifier"), "albert.pooler")


# The sentence-order head of ALBERT's pretraining, and the pooler that it reads.
UNUSED = (r"sop_classifier\..*", r"albert\.pooler\..*")
FAMILY = bert.family("Albert", "albert", "predictions", build, links, unused=UNUSED)
