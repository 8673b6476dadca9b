"""ModernBERT (arXiv:2412.13663)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.layers import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from xformer.models import Classifier, Head, LanguageModel, MaskedLMHead, TokenClassifier
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import Family, activation, embedding, encoder_heads, layers, rate
from xformer.pretrained.names import Link, Links, fused, linear, norm, same

POOLINGS = {"cls": "first", "mean": "mean"}  # classifier_pooling -> Classifier.token


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration.

    By default layers 0, 3, 6, ... attend to all tokens. The others have a window of
    `local_attention` tokens around the query, and RoPE of another base.
    """
    # They concern the computation of the loss, or kernels.
    c.ignore("sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn")
    c.ignore("initializer_cutoff_factor")
    c.unread("position_embedding_type", "absolute")
    c.unread("reference_compile", True, False)
    c.unread("repad_logits_with_grad", True, False)
    config = block(c)
    c.unread("layer_norm_eps", config.norm.eps)
    n_layers = layers(c, default=22)
    half = c.integer("local_attention", low=1, default=128) // 2
    each = c.integer("global_attn_every_n_layers", low=1, default=3)
    sizes = llama.windows(c, (half, half), lambda i: i % each != 0, n_layers)
    first, *others = llama.windowed(config, sizes)
    full, sliding = ("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0)
    ropes: Any = {"full": full, "sliding": sliding, "scaled": (llama.FULL, llama.SLIDING)}
    dropout = rate(c, "embedding_dropout", 0.0)
    embed = embedding(c, config.d_model, 50368, norm=config.norm, dropout=dropout)
    return LanguageModel(
        embed,
        (replace(first, attn_norm=False), *others),
        causal=False,
        rotary=llama.rope_by_window(c, config, sizes, 8192, **ropes),
        head=head_of(c, head, config.norm),
    )


def block(c: Config) -> BlockConfig:
    """Return a pre-LN block with a gated feed-forward network."""
    # The rate is that of the attention's output, too. A block has one rate for both sublayers.
    c.only("attention_dropout", 0.0)
    attn = AttentionConfig(
        d_model=c.integer("hidden_size", low=1, default=768),
        n_heads=c.integer("num_attention_heads", low=1, default=12),
        bias=c.flag("attention_bias", default=False),
    )
    c.only("head_dim", attn.head_width)  # RoPE of transformers reads it
    ffn = FeedForwardConfig(
        d_ff=c.integer("intermediate_size", low=1, default=1152),
        activation=activation(c, "hidden_activation", "gelu"),
        gated=True,
        bias=c.flag("mlp_bias", default=False),
        dropout=rate(c, "mlp_dropout", 0.0),
    )
    eps = c.number("norm_eps", low=0, default=1e-5)
    return BlockConfig(attn, ffn, NormConfig(eps=eps, bias=c.flag("norm_bias", default=False)))


def head_of(c: Config, head: str, config: NormConfig) -> Head | None:
    """Return the head. config: of its norm."""
    act = activation(c, "classifier_activation", "gelu")
    bias = c.flag("classifier_bias", default=False)
    token = POOLINGS[c.text("classifier_pooling", choices=tuple(POOLINGS), default="cls")]
    dropout = rate(c, "classifier_dropout", 0.0)
    tied = c.flag("tie_word_embeddings", default=True)
    out_bias = c.flag("decoder_bias", default=True)
    if head == "masked-lm":
        return MaskedLMHead(act, config.eps, tied, bias, config.bias, out_bias)
    options: dict[str, Any] = {"dropout": dropout, "dense_bias": bias, "norm": config}
    if head == "classifier":
        return Classifier(c.labels(), token, act, **options)
    if head == "token_classifier":
        return TokenClassifier(c.labels(), dense=act, **options)
    return None


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from same("model.embeddings.tok_embeddings.weight", "embed.table")
    yield from norm("model.embeddings.norm", "embed.norm")
    for i in range(len(model.blocks)):
        theirs, ours = f"model.layers.{i}", f"stack.blocks.{i}"
        qkv = f"{theirs}.attn.Wqkv"
        yield from norm(f"{theirs}.attn_norm", f"{ours}.attn_norm")
        yield from fused(f"{qkv}.weight", f"{qkv}.bias", f"{ours}.attn")
        yield from linear(f"{theirs}.attn.Wo", f"{ours}.attn.o")
        yield from norm(f"{theirs}.mlp_norm", f"{ours}.ffn_norm")
        # The half that the activation is of comes first.
        halves = (f"{ours}.ffn.gate", f"{ours}.ffn.up")
        yield Link((f"{theirs}.mlp.Wi.weight",), tuple(f"{leaf}.w" for leaf in halves), True)
        yield Link((f"{theirs}.mlp.Wi.bias",), tuple(f"{leaf}.b" for leaf in halves))
        yield from linear(f"{theirs}.mlp.Wo", f"{ours}.ffn.down")
    yield from norm("model.final_norm", "stack.norm")
    yield from linear("head.dense", "head.dense")
    yield from norm("head.norm", "head.norm")
    yield from linear("classifier", "head.out")
    yield from linear("decoder", "head")


FAMILY = Family(
    heads=encoder_heads("ModernBert"),
    build=build,
    links=links,
    prefix="model.",
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    buffers=(r".*rotary_emb\.(\w+_)?inv_freq",),
)
