"""The encoder-decoder Transformer of arXiv:1706.03762."""

from __future__ import annotations

from xformer.dispatch.checks import require_layers
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.block import BlockConfig
from xformer.layers.embed import EmbedConfig
from xformer.layers.feed_forward import FeedForwardConfig
from xformer.layers.norm import NormConfig
from xformer.models.encoder_decoder import EncoderDecoder
from xformer.models.lm_head import LMHead


def Transformer(
    src_vocab_size: int,
    tgt_vocab_size: int,
    d_model: int,
    n_heads: int,
    n_encoder_layers: int,
    n_decoder_layers: int,
    max_len: int,
    pad_id: int = 0,
    d_ff: int | None = None,
    d_head: int | None = None,
    d_value: int | None = None,
    n_kv_heads: int | None = None,
    src_width: int | None = None,
    tgt_width: int | None = None,
    activation: str = "relu",
    norm_placement: str = "post",
    eps: float = 1e-5,
    bias: bool = True,
    positions: str = "sinusoidal",
    position_mode: str = "add",
    d_positions: int | None = None,
    shared_memory: bool = False,
    tied: bool = False,
    dropout: float = 0.0,
    activation_checkpointing: bool = False,
    residual_scale: float | None = None,
) -> EncoderDecoder:
    """The `EncoderDecoder` of the paper, whose layers are all equal.

    Unlike in section 3.4 of the paper, embeddings are not multiplied by sqrt(d_model). A tied head
    has no bias.

    max_len: the most tokens of a source and of a target
    pad_id: of `EncoderDecoder`
    d_ff: the width inside the feed-forward networks; None: 4 * d_model
    d_head, d_value: widths of a head's keys and values; None: d_model / n_heads, and d_head
    n_kv_heads: heads of keys and values; None: n_heads
    src_width, tgt_width: of the embedding tables; None: d_model
    activation, norm_placement, residual_scale: of `layers.BlockConfig`; residual_scale = 0 is
        ReZero
    positions, position_mode, d_positions: of `layers.EmbedConfig`
    shared_memory, activation_checkpointing: of `EncoderDecoder`
    tied: the output head shares the table of the target's embedding

    ValueError for sizes and options that do not fit together.
    """
    require_layers(
        "Transformer", n_encoder_layers=n_encoder_layers, n_decoder_layers=n_decoder_layers
    )
    attn = AttentionConfig(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_value=d_value,
        bias=bias,
        dropout=dropout,
    )
    block = BlockConfig(
        attn,
        FeedForwardConfig(4 * d_model if d_ff is None else d_ff, activation, bias=bias),
        NormConfig(eps=eps, bias=bias),
        norm_placement,
        dropout=dropout,
        residual_scale=residual_scale,
    )
    in_heads = position_mode == "qkv"
    if in_heads and attn.value_width != attn.head_width:
        raise ValueError(
            f"Transformer: position_mode 'qkv' needs d_value = d_head = {attn.head_width}, "
            f"got {attn.value_width}"
        )
    src_embed, tgt_embed = (
        EmbedConfig(
            vocab_size=size,
            width=d_model if width is None else width,
            d_model=d_model,
            max_len=max_len,
            positions=positions,
            mode=position_mode,
            d_positions=attn.head_width if in_heads else d_positions,
            dropout=dropout,
        )
        for size, width in ((src_vocab_size, src_width), (tgt_vocab_size, tgt_width))
    )
    return EncoderDecoder(
        encoder=(block,) * int(n_encoder_layers),
        decoder=(block,) * int(n_decoder_layers),
        src_embed=src_embed,
        tgt_embed=tgt_embed,
        shared_memory=shared_memory,
        head=LMHead(tied=tied, bias=bias and not tied),
        pad_id=pad_id,
        activation_checkpointing=activation_checkpointing,
    )
