"""T5 1.0 and 1.1 (arXiv:1910.10683, 2002.05202)."""

from __future__ import annotations

from typing import Any

from xformer.layers import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    NormConfig,
    RelativeConfig,
)
from xformer.models import EncoderDecoder, LanguageModel, LMHead
from xformer.pretrained.config import Config
from xformer.pretrained.family import ACTIVATIONS, Family, embedding, layers, rate
from xformer.pretrained.names import Links, attention, linear, norm, same


def build(c: Config, head: str) -> EncoderDecoder | LanguageModel:
    """Return the model of a configuration. In T5 1.1 the head is tied only if the file has none."""
    config, dropout = block(c), rate(c, "dropout_rate", 0.1)
    c.ignore("n_positions", "classifier_dropout")
    embed = embedding(c, config.d_model, 32128, dropout=dropout)
    buckets = {
        "n_buckets": c.integer("relative_attention_num_buckets", low=4, high=1 << 20, default=32),
        "max_distance": c.integer("relative_attention_max_distance", low=2, default=128),
    }
    relative_bias = RelativeConfig(config.attn.n_heads, **buckets)
    n_layers = layers(c, "num_layers", 6)
    encoder = (config,) * n_layers
    decoder = (config,) * layers(c, "num_decoder_layers", n_layers)
    # By default tie_word_embeddings decides about the scale too; transformers 5 has a key for it.
    ties = c.flag("tie_word_embeddings", default=True)
    scales = c.flag("scale_decoder_outputs", default=ties)
    if head == "encoder":
        options: Any = {"causal": False, "relative_bias": relative_bias, "head": None}
        return LanguageModel(embed, encoder, out_dropout=dropout, **options)
    absent = ties if c.tensors is None else "lm_head.weight" not in c.tensors
    top = LMHead(tied=scales or absent, scale=config.d_model**-0.5 if scales else 1.0)
    return EncoderDecoder(
        encoder=encoder,
        decoder=decoder,
        src_embed=embed,
        shared_embed=True,
        encoder_relative_bias=relative_bias,
        decoder_relative_bias=RelativeConfig(config.attn.n_heads, bidirectional=False, **buckets),
        head=top if head == "lm" else None,
        out_dropout=dropout,
    )


def block(c: Config) -> BlockConfig:
    """Return a pre-LN block with RMSNorm and attention scores that are not scaled."""
    kind = c.text("feed_forward_proj", default="relu")
    gate, _, act = kind.rpartition("-")
    act = "gelu_new" if kind == "gated-gelu" else act
    if gate not in ("", "gated") or act not in ACTIVATIONS:
        raise c.refused("feed_forward_proj", f"one of {', '.join(ACTIVATIONS)}, or gated-...")
    c.only("dense_act_fn", act)
    c.only("is_gated_act", bool(gate))
    dropout = rate(c, "dropout_rate", 0.1)
    attn = AttentionConfig(
        d_model=c.integer("d_model", low=1, default=512),
        n_heads=c.integer("num_heads", low=1, default=8),
        d_head=c.integer("d_kv", low=1, default=64),
        bias=False,
        scale=1.0,
        dropout=dropout,
    )
    ffn = FeedForwardConfig(
        d_ff=c.integer("d_ff", low=1, default=2048),
        activation=ACTIVATIONS[act],
        gated=bool(gate),
        bias=False,
        dropout=dropout,
    )
    norm_config = NormConfig("rms", c.number("layer_norm_epsilon", low=0, default=1e-6))
    return BlockConfig(attn, ffn, norm_config, dropout=dropout)


def links(model: EncoderDecoder | LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`).

    The model is an encoder-decoder, or the encoder alone.
    """
    if isinstance(model, LanguageModel):
        yield from same("shared.weight", "embed.table")
        yield from stack_links("encoder", "stack", model.blocks)
        return
    yield from same("shared.weight", "src_embed.table")
    yield from stack_links("encoder", "encoder", model.encoder)
    yield from stack_links("decoder", "decoder", model.decoder, cross=True)
    yield from linear("lm_head", "head")


def stack_links(
    theirs: str, ours: str, blocks: tuple[BlockConfig, ...], *, cross: bool = False
) -> Links:
    """Yield the links of an encoder or a decoder. Its first layer has the relative bias's table.

    cross: whether the blocks have cross-attention
    """
    table = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield from same(table, f"{ours}.relative_bias")
    for i, config in enumerate(blocks):
        layer, leaf = f"{theirs}.block.{i}.layer", f"{ours}.blocks.{i}"
        yield from attention(f"{layer}.0.SelfAttention", f"{leaf}.attn", "q", "k", "v", "o")
        yield from norm(f"{layer}.0.layer_norm", f"{leaf}.attn_norm")
        if cross:
            yield from attention(f"{layer}.1.EncDecAttention", f"{leaf}.cross", "q", "k", "v", "o")
            yield from norm(f"{layer}.1.layer_norm", f"{leaf}.cross_norm")
        last = f"{layer}.{2 if cross else 1}"
        yield from norm(f"{last}.layer_norm", f"{leaf}.ffn_norm")
        ffn = f"{last}.DenseReluDense"
        gated = isinstance(config.ffn, FeedForwardConfig) and config.ffn.gated
        parts = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "up"}
        for name, part in parts.items():
            yield from linear(f"{ffn}.{name}", f"{leaf}.ffn.{part}")
        yield from linear(f"{ffn}.wo", f"{leaf}.ffn.down")
    yield from norm(f"{theirs}.final_layer_norm", f"{ours}.norm")


FAMILY = Family(
    heads={
        "T5ForConditionalGeneration": "lm",
        "T5WithLMHeadModel": "lm",
        "T5Model": "hidden",
        "T5EncoderModel": "encoder",
    },
    build=build,
    links=links,
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    free=("is_encoder_decoder",),
    tied={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    # Old files have this table, but nothing reads it.
    buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)
