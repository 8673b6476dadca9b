"""GPT: a decoder-only language model, by default with the layers of GPT-2."""

from __future__ import annotations

from xformer.dispatch.checks import require_layers
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.block import BlockConfig
from xformer.layers.embed import EmbedConfig
from xformer.layers.feed_forward import FeedForwardConfig
from xformer.layers.norm import NormConfig
from xformer.models.language_model import LanguageModel
from xformer.models.lm_head import LMHead


def GPT(
    vocab_size: int,
    n_layers: int,
    d_model: int,
    n_heads: int,
    max_len: int,
    d_ff: int | None = None,
    n_kv_heads: int | None = None,
    activation: str = "gelu_tanh",
    norm_placement: str = "pre",
    eps: float = 1e-5,
    bias: bool = True,
    positions: str = "learned",
    position_mode: str = "add",
    d_positions: int | None = None,
    memory_len: int | None = None,
    tied: bool = True,
    dropout: float = 0.0,
    activation_checkpointing: bool = False,
    residual_scale: float | None = None,
    reversible: bool = False,
) -> LanguageModel:
    """The `LanguageModel` with equal blocks, which has the layers of GPT-2 by default.

    gpt = GPT(vocab_size=256, n_layers=4, d_model=128, n_heads=4, max_len=128)
    params = gpt.init(seed=0, backend="numpy")
    loss, cache = gpt.loss(params, tokens, targets)
    grads = cache.backward()

    max_len: the most tokens of a text
    d_ff: the width inside the feed-forward network; None: 4 * d_model
    n_kv_heads: heads of keys and values; None: n_heads
    activation, norm_placement, residual_scale, reversible: of `layers.BlockConfig`;
        residual_scale = 0 is ReZero
    positions: "learned", "sinusoidal", "none"; "xl": relative positions of Transformer-XL in every
        layer, with which max_len does not limit a text
    position_mode, d_positions: of `layers.EmbedConfig`; d_positions = None: d_model
    memory_len: of `LanguageModel`, with positions "xl"
    tied: the output head shares the table of the embedding
    activation_checkpointing: of `LanguageModel`

    ValueError for sizes and options that do not fit together.
    """
    require_layers("GPT", n_layers=n_layers)
    if d_positions is not None and position_mode != "concat":
        raise ValueError(f'GPT: d_positions needs position_mode "concat", got {position_mode!r}')
    is_xl = positions == "xl"
    if is_xl and position_mode != "add":
        raise ValueError(f'GPT: positions "xl" need position_mode "add", got {position_mode!r}')
    attn = AttentionConfig(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        bias=bias,
        xl=is_xl,
        dropout=dropout,
    )
    d_positions = d_model if d_positions is None else d_positions
    block = BlockConfig(
        attn,
        FeedForwardConfig(4 * d_model if d_ff is None else d_ff, activation, bias=bias),
        NormConfig(eps=eps, bias=bias),
        norm_placement,
        dropout=dropout,
        residual_scale=residual_scale,
        reversible=reversible,
    )
    embed = EmbedConfig(
        vocab_size=vocab_size,
        width=d_model,
        d_model=d_model,
        max_len=None if is_xl else max_len,
        positions="none" if is_xl else positions,
        mode=position_mode,
        d_positions=attn.head_width if position_mode == "qkv" else d_positions,
        dropout=dropout,
    )
    return LanguageModel(
        embed,
        (block,) * int(n_layers),
        head=LMHead(tied=tied),
        memory_len=memory_len,
        activation_checkpointing=activation_checkpointing,
    )
