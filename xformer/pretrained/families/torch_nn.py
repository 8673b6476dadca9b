"""torch's `nn.Transformer` and `nn.TransformerEncoder`: their state dicts in safetensors files.

A state dict does not store the number of heads. So a config.json beside it has the arguments of the
constructor: {"model_type": "nn.Transformer", "d_model": 512, "nhead": 8, ...}. For an encoder it
also has "num_layers" and "final_norm": whether the encoder has a final norm, with the eps and bias
of the layers. Sequences are vectors (B, T, D).
"""

from __future__ import annotations

from xformer.layers import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from xformer.models import EncoderDecoder, LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.family import Family, layers, rate
from xformer.pretrained.names import Links, fused, linear, norm


def build(c: Config, head: str) -> EncoderDecoder:
    """Return the model of an `nn.Transformer`: encoder and decoder each have a final norm."""
    config = block(c)
    return EncoderDecoder(
        encoder=(config,) * layers(c, "num_encoder_layers", 6),
        decoder=(config,) * layers(c, "num_decoder_layers", 6),
        encoder_norm=True,
        decoder_norm=True,
    )


def build_encoder(c: Config, head: str) -> LanguageModel:
    """Return the model of an `nn.TransformerEncoder` of `nn.TransformerEncoderLayer`s."""
    blocks = (block(c),) * layers(c, "num_layers")
    final_norm = c.flag("final_norm", default=False)
    return LanguageModel(None, blocks, causal=False, final_norm=final_norm, head=None)


def block(c: Config) -> BlockConfig:
    """Return the block of a configuration, for encoder and decoder layers."""
    c.ignore("batch_first", "enable_nested_tensor", "mask_check")  # they do not change the result
    dropout = rate(c, "dropout", 0.1)
    bias = c.flag("bias", default=True)
    attn = AttentionConfig(
        d_model=c.integer("d_model", low=1, default=512),
        n_heads=c.integer("nhead", low=1, default=8),
        bias=bias,
        dropout=dropout,
    )
    ffn = FeedForwardConfig(
        d_ff=c.integer("dim_feedforward", low=1, default=2048),
        activation=c.text("activation", choices=("relu", "gelu"), default="relu"),
        bias=bias,
        dropout=dropout,
    )
    norm_config = NormConfig(eps=c.number("layer_norm_eps", low=0, default=1e-5), bias=bias)
    placement = "pre" if c.flag("norm_first", default=False) else "post"
    return BlockConfig(attn, ffn, norm_config, placement, dropout=dropout)


def links(model: EncoderDecoder) -> Links:
    """Yield the links of `nn.Transformer`."""
    yield from stack_links("encoder.", "encoder", len(model.encoder))
    yield from stack_links("decoder.", "decoder", len(model.decoder), cross=True)


def encoder_links(model: LanguageModel) -> Links:
    """Yield the links of `nn.TransformerEncoder`."""
    yield from stack_links("", "stack", len(model.blocks))


def stack_links(theirs: str, ours: str, n_layers: int, *, cross: bool = False) -> Links:
    """Yield the links of an encoder or a decoder. cross: whether it has cross-attention."""
    norms = ("attn_norm", "cross_norm", "ffn_norm") if cross else ("attn_norm", "ffn_norm")
    for i in range(n_layers):
        layer, leaf = f"{theirs}layers.{i}", f"{ours}.blocks.{i}"
        yield from multihead_links(f"{layer}.self_attn", f"{leaf}.attn")
        if cross:
            yield from multihead_links(f"{layer}.multihead_attn", f"{leaf}.cross")
        yield from linear(f"{layer}.linear1", f"{leaf}.ffn.up")
        yield from linear(f"{layer}.linear2", f"{leaf}.ffn.down")
        for n, name in enumerate(norms, start=1):
            yield from norm(f"{layer}.norm{n}", f"{leaf}.{name}")
    yield from norm(f"{theirs}norm", f"{ours}.norm")


def multihead_links(theirs: str, ours: str) -> Links:
    """Yield the links of an `nn.MultiheadAttention`."""
    yield from fused(f"{theirs}.in_proj_weight", f"{theirs}.in_proj_bias", ours)
    yield from linear(f"{theirs}.out_proj", f"{ours}.o")


TRANSFORMER = Family(heads={}, build=build, links=links)
ENCODER = Family(heads={}, build=build_encoder, links=encoder_links)
