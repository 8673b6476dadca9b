"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from dataclasses import replace

from xformer.layers import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.family import Family, activation, decoder_head, embedding, layers, rate
from xformer.pretrained.names import Links, fused, linear, norm, same


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    width = c.integer("n_embd", low=1, default=768)
    c.ignore("n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn")
    c.ignore(*(f"summary_{key}" for key in ("activation", "first_dropout", "proj_to_labels")))
    c.ignore("summary_type", "summary_use_proj", "summary_last_dropout")
    c.ignore("classifier_dropout", "hidden_dropout")  # of a token classifier
    heads = c.integer("n_head", low=1, default=12)
    d_ff = c.integer("n_inner", low=1, default=4 * width)
    attn = AttentionConfig(width, heads, dropout=rate(c, "attn_pdrop", 0.1))
    ffn = FeedForwardConfig(d_ff, activation(c, "activation_function", "gelu_new"))
    norm_config = NormConfig(eps=c.number("layer_norm_epsilon", low=0, default=1e-5))
    block = BlockConfig(attn, ffn, norm_config, dropout=rate(c, "resid_pdrop", 0.1))
    by_layer = c.flag("scale_attn_by_inverse_layer_idx", default=False)
    scaled = c.flag("scale_attn_weights", default=True)
    scale = attn.head_width**-0.5 if scaled else 1.0
    max_len, dropout = c.integer("n_positions", low=1, default=1024), rate(c, "embd_pdrop", 0.1)
    embed = embedding(c, width, 50257, max_len=max_len, positions="learned", dropout=dropout)
    blocks = tuple(
        replace(block, attn=replace(attn, scale=scale / (i + 1) if by_layer else scale))
        for i in range(layers(c, "n_layer", 12))
    )
    tied = c.flag("tie_word_embeddings", default=True)
    return LanguageModel(embed, blocks, head=decoder_head(c, head, tied=tied))


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`).

    Weights of `Conv1D` are (I, O) in the file too.
    """
    yield from same("transformer.wte.weight", "embed.table")
    yield from same("transformer.wpe.weight", "embed.positions")
    for i in range(len(model.blocks)):
        theirs, ours = f"transformer.h.{i}", f"stack.blocks.{i}"
        qkv = f"{theirs}.attn.c_attn"
        yield from norm(f"{theirs}.ln_1", f"{ours}.attn_norm")
        yield from fused(f"{qkv}.weight", f"{qkv}.bias", f"{ours}.attn", flip=False)
        yield from linear(f"{theirs}.attn.c_proj", f"{ours}.attn.o", flip=False)
        yield from norm(f"{theirs}.ln_2", f"{ours}.ffn_norm")
        yield from linear(f"{theirs}.mlp.c_fc", f"{ours}.ffn.up", flip=False)
        yield from linear(f"{theirs}.mlp.c_proj", f"{ours}.ffn.down", flip=False)
    yield from norm("transformer.ln_f", "stack.norm")
    yield from linear("lm_head", "head")
    yield from linear("score", "head.out")


FAMILY = Family(
    heads={
        "GPT2LMHeadModel": "lm",
        "GPT2ForSequenceClassification": "classifier",
        "GPT2Model": "hidden",
    },
    build=build,
    links=links,
    prefix="transformer.",
    tied={"lm_head.weight": "transformer.wte.weight"},
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    buffers=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
