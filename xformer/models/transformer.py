"""The encoder-decoder Transformer of arXiv:1706.03762."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from array_api_compat import device

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import inference, registry
from xformer.dispatch.backend import Backend, Generator
from xformer.dispatch.checks import (
    as_indices,
    plain_numbers,
    require_id,
    require_layers,
    require_sizes,
    require_tokens,
)
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.block import BlockConfig
from xformer.layers.embed import EmbedConfig
from xformer.layers.feed_forward import FeedForwardConfig
from xformer.layers.norm import NormConfig
from xformer.models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderCache,
    EncoderDecoderParams,
)
from xformer.models.lm_head import LMHead
from xformer.models.loss import LossCache
from xformer.models.usage import not_called


@dataclass(frozen=True)
class Transformer:
    """The configuration of a Transformer. Its parameters are separate data, which `init` returns.

    Sequences are (B, T) token ids, padded with `pad_id`. Padding is masked in attention and ignored
    in the loss. A target begins with a start token and ends with an end token. Unlike in section
    3.4 of the paper, embeddings are not multiplied by sqrt(d_model). A tied head has no bias.

    ValueError for sizes and options that do not fit together.
    """

    src_vocab_size: int
    tgt_vocab_size: int
    d_model: int
    n_heads: int
    n_encoder_layers: int
    n_decoder_layers: int
    max_len: int
    pad_id: int = 0
    d_ff: int | None = None  # None: 4 * d_model
    d_head: int | None = None  # None: d_model / n_heads
    d_value: int | None = None  # None: d_head
    n_kv_heads: int | None = None  # None: n_heads
    src_width: int | None = None  # width of the source's embedding table; None: d_model
    tgt_width: int | None = None  # width of the target's embedding table; None: d_model
    activation: str = "relu"
    norm_placement: str = "post"
    eps: float = 1e-5
    bias: bool = True
    positions: str = "sinusoidal"
    position_mode: str = "add"
    d_positions: int | None = None  # see `layers.EmbedConfig`
    shared_memory: bool = False  # one key/value projection of the encoder's output for all layers
    tied: bool = False  # the output head shares the table of the target's embedding
    dropout: float = 0.0
    # Each block saves only its input, and runs again in backward.
    activation_checkpointing: bool = False
    residual_scale: float | None = None  # of `layers.BlockConfig`; 0: ReZero

    __call__ = not_called

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_layers(
            "Transformer",
            n_encoder_layers=self.n_encoder_layers,
            n_decoder_layers=self.n_decoder_layers,
        )
        attn = self.network.encoder[0].attn  # built here for its checks
        smaller = min(self.src_vocab_size, self.tgt_vocab_size)
        require_id("Transformer", smaller, pad_id=self.pad_id)
        if self.position_mode == "qkv" and attn.value_width != attn.head_width:
            raise ValueError(
                f"Transformer: position_mode 'qkv' needs d_value = d_head = {attn.head_width}, "
                f"got {attn.value_width}"
            )

    @cached_property
    def network(self) -> EncoderDecoder:
        """The `EncoderDecoder` of this configuration."""
        attn = AttentionConfig(
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            d_head=self.d_head,
            d_value=self.d_value,
            bias=self.bias,
            dropout=self.dropout,
        )
        d_ff = 4 * self.d_model if self.d_ff is None else self.d_ff
        ffn = FeedForwardConfig(d_ff, self.activation, bias=self.bias)
        norm = NormConfig(eps=self.eps, bias=self.bias)
        block = BlockConfig(
            attn,
            ffn,
            norm,
            self.norm_placement,
            dropout=self.dropout,
            residual_scale=self.residual_scale,
        )

        def embed(vocab_size: int, width: int | None) -> EmbedConfig:
            in_heads = self.position_mode == "qkv"
            return EmbedConfig(
                vocab_size=vocab_size,
                width=self.d_model if width is None else width,
                d_model=self.d_model,
                max_len=self.max_len,
                positions=self.positions,
                mode=self.position_mode,
                d_positions=attn.head_width if in_heads else self.d_positions,
                dropout=self.dropout,
            )

        return EncoderDecoder(
            encoder=(block,) * self.n_encoder_layers,
            decoder=(block,) * self.n_decoder_layers,
            src_embed=embed(self.src_vocab_size, self.src_width),
            tgt_embed=embed(self.tgt_vocab_size, self.tgt_width),
            shared_memory=self.shared_memory,
            head=LMHead(tied=self.tied, bias=self.bias and not self.tied),
            activation_checkpointing=self.activation_checkpointing,
        )

    def init(
        self, seed: int = 0, backend: str | Backend = "numpy", dtype: str = "float32"
    ) -> EncoderDecoderParams:
        """Initial parameters: Xavier uniform; embeddings normal with variance 1 / width."""
        return self.init_from(registry.get(backend).generator(seed, dtype))

    def init_from(self, rng: Generator) -> EncoderDecoderParams:
        """Initial parameters as from `init`, with random numbers, backend and dtype of `rng`."""
        return self.network.init_from(rng)

    def forward(
        self,
        params: EncoderDecoderParams,
        src: Array,
        tgt: Array,
        *,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, EncoderDecoderCache]:
        """Logits (B, T, V) of the token after each of `tgt`.

        src: (B, S) ids in the source vocabulary
        tgt: (B, T) ids in the target vocabulary
        dropout_key: None: no dropout
        ValueError or TypeError for other ids.
        """
        masks = self._masks(src, tgt)
        return self.network.forward(params, src, tgt, dropout_key=dropout_key, **masks)

    def loss(
        self,
        params: EncoderDecoderParams,
        src: Array,
        tgt: Array,
        *,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, LossCache[EncoderDecoderParams]]:
        """The mean cross-entropy in nats of tgt[:, 1:] after tgt[:, :-1], without padding.

        src: (B, S) ids in the source vocabulary
        tgt: (B, T + 1) ids in the target vocabulary, from the start token to the end token
        dropout_key: None: no dropout
        options: of `ops.cross_entropy`
        ValueError or TypeError for other ids.
        """
        require_tokens("Transformer", "tgt", tgt)
        if tgt.shape[1] < 2:
            raise ValueError(f"loss: tgt must hold at least 2 tokens, got shape {tuple(tgt.shape)}")
        masks = self._masks(src, tgt[:, :-1])
        options = {"ignore_index": self.pad_id, "dropout_key": dropout_key, **masks, **options}
        return self.network.loss(params, src, tgt[:, :-1], tgt[:, 1:], **options)

    @inference()
    def generate(
        self,
        params: EncoderDecoderParams,
        src: Array,
        *,
        start_id: int,
        end_id: int,
        max_new_tokens: int,
    ) -> Array:
        """Decode greedily: ids (B, at most max_new_tokens), with padding after the end token.

        src: (B, S) ids in the source vocabulary
        start_id, end_id: the tokens that begin and end a target
        ValueError if start_id or end_id is outside the target vocabulary. It reads the ids after
        each step, to stop early, so it does not work under `jax.jit`.
        """
        ids = {"start_id": start_id, "end_id": end_id}
        start_id, end_id = require_id("generate", self.tgt_vocab_size, **ids)
        (max_new_tokens,) = require_sizes("generate", 0, max_new_tokens=max_new_tokens)
        require_tokens("generate", "src", src)
        xp = array_namespace(src)
        src_mask = self._is_token(src)
        (memory, memory_pos), _ = self.network.encode(params, src, src_mask=src_mask)
        src = as_indices(src)
        tgt = xp.full((src.shape[0], 1), start_id, dtype=src.dtype, device=device(src))
        done = xp.zeros_like(tgt[:, 0], dtype=xp.bool)
        is_pad = xp.arange(self.tgt_vocab_size, device=device(src)) == self.pad_id  # (V,)
        for _ in range(min(max_new_tokens, self.max_len)):
            logits, _ = self.network.decode_target(
                params, memory, memory_pos, tgt, src_mask=src_mask, tgt_mask=self._is_token(tgt)
            )
            scores = xp.where(is_pad, -xp.inf, logits[:, -1, :])
            best = xp.astype(xp.argmax(scores, axis=-1), src.dtype)
            best = xp.where(done, self.pad_id, best)
            tgt = xp.concat([tgt, best[:, None]], axis=1)
            done = done | (best == end_id)
            if bool(xp.all(done)):
                break
        return tgt[:, 1:]

    def _is_token(self, ids: Array) -> Array:
        """(B, T): True for tokens, False for padding."""
        return as_indices(ids) != self.pad_id

    def _masks(self, src: Array, tgt: Array) -> dict[str, Array]:
        require_tokens("Transformer", "src", src)
        require_tokens("Transformer", "tgt", tgt)
        return {"src_mask": self._is_token(src), "tgt_mask": self._is_token(tgt)}
