"""MPNet (arXiv:2004.09297): RoBERTa without token types, with the relative bias of T5."""

from __future__ import annotations

from dataclasses import replace

from xformer.layers import RelativeConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert, roberta
from xformer.pretrained.names import Links, attention, linear, norm, same


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. head: one of `FAMILY.heads`."""
    config = bert.block(c)
    key = "hidden_dropout_prob"
    top = bert.head_of(c, head, config, act="gelu", key=key, dense="tanh", bare=bert.pooler(c))
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


UNUSED = (r"mpnet\.pooler\..*",)
FAMILY = bert.family("MPNet", "mpnet", "lm_head", build, links, unused=UNUSED)
