"""Llama 1 to 3 (arXiv:2302.13971, 2407.21783), SmolLM2, and functions for derived families."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from xformer.layers import (
    AttentionConfig,
    BlockConfig,
    ExpertsConfig,
    FeedForwardConfig,
    NormConfig,
    RopeConfig,
)
from xformer.layers.rope_by_layer import Rotary
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.family import Family, activation, decoder_head, embedding, layers, rate
from xformer.pretrained.names import Links, attention, linear, norm, same
from xformer.pretrained.rope import rope, rope_by_type

FULL, SLIDING = "full_attention", "sliding_attention"


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    c.ignore("pretraining_tp")  # if above 1, the same matmuls are computed in parts
    c.unread("rope_interleaved", False)
    c.ignore("is_llama_config", "max_sequence_length")  # in SmolLM2 and Llama 1; nothing reads them
    bias = c.flag("attention_bias", default=False)
    config = block(c, bias=bias, ffn=gated(c, bias=c.flag("mlp_bias", default=False)))
    return decoder(c, head, (config,) * layers(c))


def block(
    c: Config,
    *,
    eps: float = 1e-6,
    kv_heads: int | None = None,
    d_head: int | None = None,
    ffn: FeedForwardConfig | ExpertsConfig | None = None,
    norm_placement: str = "pre",
    norm_offset: float = 0.0,
    **attn: Any,
) -> BlockConfig:
    """Return a block of RMSNorm, attention with RoPE and a gated feed-forward network.

    eps: the family's default
    kv_heads, d_head, attn: of `attend`
    ffn: None: `gated(c)`
    """
    return BlockConfig(
        attend(c, kv_heads=kv_heads, d_head=d_head, **attn),
        gated(c) if ffn is None else ffn,
        NormConfig("rms", c.number("rms_norm_eps", low=0, default=eps), norm_offset),
        norm_placement,
    )


def attend(
    c: Config, *, kv_heads: int | None = None, d_head: int | None = None, **more: Any
) -> AttentionConfig:
    """Return the options of the attention.

    kv_heads: the family's default if the key is absent. null means all heads.
    d_head: the family's default if the key is absent. null means d_model / n_heads.
    more: further options. By default it has no biases.
    """
    heads = c.integer("num_attention_heads", low=1)
    options: dict[str, Any] = {
        "d_model": c.integer("hidden_size", low=1),
        "n_heads": heads,
        "n_kv_heads": c.integer(
            "num_key_value_heads", low=1, default=kv_heads or heads, null=heads
        ),
        "d_head": c.integer("head_dim", low=1, default=d_head, null=None),
        "bias": False,
        "dropout": rate(c, "attention_dropout", 0.0),
    }
    return AttentionConfig(**options | more)


def gated(c: Config, act: str | None = None, *, bias: bool = False) -> FeedForwardConfig:
    """Return a gated feed-forward network. act: None: the value of `hidden_act`, default SiLU."""
    act = activation(c, "hidden_act", "silu") if act is None else act
    return FeedForwardConfig(c.integer("intermediate_size", low=1), act, gated=True, bias=bias)


def decoder(
    c: Config,
    head: str,
    blocks: tuple[BlockConfig, ...],
    *,
    max_len: int = 2048,
    theta: float = 10000.0,
    tied: bool = False,
    rotary: Rotary = None,
    embed_scale: float = 1.0,
    embed_dropout: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    **options: Any,
) -> LanguageModel:
    """Return a decoder of `blocks`.

    head: the head, as in `Family.heads`
    max_len, theta, tied: the family's values if the configuration has no such key; without
        `rotary`, which has the first two
    rotary: the RoPE of the layers; None: `rope` of the configuration for all layers, with heads
        that are rotated whole
    embed_scale, embed_dropout: of the embedding
    logit_scale, softcap: of the logits
    options: further options of `LanguageModel`
    """
    embed = embedding(c, blocks[0].d_model, scale=embed_scale, dropout=embed_dropout)
    if rotary is None:
        rotary = rope(c, width=blocks[0].attn.head_width, max_len=max_len, theta=theta)
    is_tied = c.flag("tie_word_embeddings", default=tied)
    top = decoder_head(c, head, tied=is_tied, scale=logit_scale, softcap=softcap)
    return LanguageModel(embed, blocks, rotary=rotary, head=top, **options)


def window(c: Config, default: int | None = None) -> tuple[int, None] | None:
    """Return (tokens before the query, None), the window; None if there is none.

    `sliding_window` is one more, because it includes the query.
    """
    size = c.integer("sliding_window", low=1, default=default, null=None)
    return None if size is None else (size - 1, None)


def windows(
    c: Config, sliding: Any, default: Callable[[int], bool], n_layers: int | None = None
) -> tuple[Any, ...]:
    """Return the window of each layer: `sliding` or None.

    default: whether layer i has a window, if the key `layer_types` is missing
    n_layers: None: the value of `num_hidden_layers`
    """
    n_layers = layers(c) if n_layers is None else n_layers
    choices = (FULL, SLIDING)
    kinds = c.texts("layer_types", choices=choices, length=n_layers, default=None)
    usual = map(default, range(n_layers))
    slides = tuple(usual if kinds is None else (kind == SLIDING for kind in kinds))
    if any(slides) and sliding is None:
        raise c.refused("layer_types", "full_attention where there is no sliding window")
    return tuple(sliding if is_sliding else None for is_sliding in slides)


def rope_by_window(
    c: Config,
    config: BlockConfig,
    sizes: tuple[Any, ...],
    max_len: int,
    *,
    full: tuple[str, float],
    sliding: tuple[str, float],
    scaled: Collection[str] = (FULL,),
) -> tuple[RopeConfig, ...]:
    """Return the RoPE of each layer, whose base depends on whether it has a window.

    full, sliding: the key of the base outside the parameters, and the family's default
    scaled: of `rope_by_type`
    """
    names, thetas = {FULL: full[0], SLIDING: sliding[0]}, {FULL: full[1], SLIDING: sliding[1]}
    width = config.attn.head_width
    ropes = rope_by_type(c, width=width, max_len=max_len, thetas=thetas, names=names, scaled=scaled)
    return tuple(ropes[FULL if size is None else SLIDING] for size in sizes)


def windowed(config: BlockConfig, sizes: tuple[Any, ...]) -> tuple[BlockConfig, ...]:
    """Return the blocks of all layers: `config` with the window of each layer."""
    return tuple(replace(config, attn=replace(config.attn, window=size)) for size in sizes)


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`).

    They are all tensors that a layer of Llama, or of a family derived from it, may have.
    """
    yield from block_links(theirs, ours)
    yield from feed_forward_links(f"{theirs}.mlp", f"{ours}.ffn")


def block_links(theirs: str, ours: str) -> Links:
    """Yield the links of attention and of both norms of a block."""
    yield from norm(f"{theirs}.input_layernorm", f"{ours}.attn_norm")
    yield from attention_links(f"{theirs}.self_attn", f"{ours}.attn")
    yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm")


def attention_links(theirs: str, ours: str) -> Links:
    """Yield the links of attention, with the norms of queries and keys."""
    yield from attention(theirs, ours, "q_proj", "k_proj", "v_proj", "o_proj")
    yield from norm(f"{theirs}.q_norm", f"{ours}.q_norm")
    yield from norm(f"{theirs}.k_norm", f"{ours}.kv.k_norm")


def feed_forward_links(theirs: str, ours: str) -> Links:
    """Yield the links of the gated feed-forward network."""
    for name in ("gate", "up", "down"):
        yield from linear(f"{theirs}.{name}_proj", f"{ours}.{name}")


HEADS = {"ForCausalLM": "lm", "ForSequenceClassification": "classifier", "Model": "hidden"}


def family(
    name: str,
    build: Any,
    layer: Any = layer_links,
    *,
    heads: Collection[str] = tuple(HEADS),
    **fields: Any,
) -> Family:
    """Return the family whose architectures begin with `name`.

    layer: (prefix of a layer's tensors, of its leaves, configuration) -> links of the layer
    heads: how the names of the architectures end
    fields: further fields of `Family`
    """

    def links(model: LanguageModel) -> Links:
        yield from same("model.embed_tokens.weight", "embed.table")
        for i, config in enumerate(model.blocks):
            yield from layer(f"model.layers.{i}", f"stack.blocks.{i}", config)
        yield from norm("model.norm", "stack.norm")
        yield from linear("lm_head", "head")
        yield from linear("score", "head.out")

    return Family(
        heads={f"{name}{end}": HEADS[end] for end in heads},
        build=build,
        links=links,
        prefix="model.",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        buffers=(r".*rotary_emb\.inv_freq",),
        **fields,
    )


FAMILY = family("Llama", build)
