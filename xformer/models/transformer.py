"""The encoder-decoder Transformer of arXiv:1706.03762."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from xformer import backends, ops
from xformer.backends import Generator
from xformer.checks import as_indices, require_id, require_sizes, require_tokens
from xformer.initial import normal, xavier_uniform
from xformer.layers.block import SITES, BlockConfig
from xformer.layers.embed import EmbedConfig, EmbedParams, embed
from xformer.layers.linear import LinearParams
from xformer.layers.stack import StackParams, dropout_streams, stack
from xformer.models.parts import (
    LossCache,
    OutputHeadCache,
    output_head,
    require_params,
    token_loss,
)
from xformer.typing import Array


@dataclass(frozen=True)
class Transformer:
    """Sizes and choices; parameters are data, made by `init`. ValueError where they do not fit.

    Sequences are (B, T) token ids, padded with `pad_id`, which neither is attended to nor counts
    in the loss. A target begins with a start token and ends with an end token. Embeddings are not
    multiplied by sqrt(d_model), as section 3.4 does; a tied head has no bias.
    """

    src_vocab_size: int
    tgt_vocab_size: int
    d_model: int
    n_heads: int
    n_encoder_layers: int
    n_decoder_layers: int
    max_len: int
    pad_id: int = 0
    d_ff: int | None = None  # 4 * d_model unless given
    d_head: int | None = None  # d_model / n_heads unless given
    d_value: int | None = None  # d_head unless given
    n_kv_heads: int | None = None  # n_heads unless given
    src_width: int | None = None  # of the source's embeddings; d_model unless given
    tgt_width: int | None = None  # of the target's
    activation: str = "relu"
    norm: str = "post"
    eps: float = 1e-5
    bias: bool = True
    positions: str = "sinusoidal"
    position_mode: str = "add"
    d_positions: int | None = None  # see `layers.EmbedConfig`
    shared_memory: bool = False  # one key/value projection of the encoder's output for all layers
    tied: bool = False  # the target's embedding is the output head too
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require_sizes(
            "Transformer",
            1,
            n_encoder_layers=self.n_encoder_layers,
            n_decoder_layers=self.n_decoder_layers,
        )
        self.block_config, self.src_embed, self.tgt_embed  # noqa: B018 - built for their checks
        if self.tied and self.tgt_embed.width != self.d_model:
            raise ValueError(
                f"Transformer: a tied head needs tgt_width = d_model = {self.d_model}, "
                f"got {self.tgt_width}"
            )
        smaller = min(self.src_vocab_size, self.tgt_vocab_size)
        require_id("Transformer", smaller, pad_id=self.pad_id)
        block = self.block_config
        if self.position_mode == "qkv" and block.value_width != block.head_width:
            raise ValueError(
                f"Transformer: position_mode 'qkv' needs d_value = d_head = {block.head_width}, "
                f"got {block.value_width}"
            )

    @property
    def block_config(self) -> BlockConfig:
        """The configuration of every block, of the encoder and of the decoder."""
        return BlockConfig(
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_ff=4 * self.d_model if self.d_ff is None else self.d_ff,
            n_kv_heads=self.n_kv_heads,
            d_head=self.d_head,
            d_value=self.d_value,
            activation=self.activation,
            norm=self.norm,
            eps=self.eps,
            bias=self.bias,
            dropout=self.dropout,
        )

    @property
    def src_embed(self) -> EmbedConfig:
        """The configuration of the source's embedding."""
        return self._embed_config(self.src_vocab_size, self.src_width)

    @property
    def tgt_embed(self) -> EmbedConfig:
        """The configuration of the target's embedding."""
        return self._embed_config(self.tgt_vocab_size, self.tgt_width)

    def _embed_config(self, vocab_size: int, width: int | None) -> EmbedConfig:
        d_positions = self.d_positions
        if self.position_mode == "qkv":
            d_positions = self.block_config.head_width
        return EmbedConfig(
            vocab_size=vocab_size,
            width=self.d_model if width is None else width,
            d_model=self.d_model,
            max_len=self.max_len,
            positions=self.positions,
            mode=self.position_mode,
            d_positions=d_positions,
            dropout=self.dropout,
        )

    def init(
        self, seed: int = 0, backend: str = "numpy", dtype: str = "float32"
    ) -> TransformerParams:
        """Initial parameters: Xavier uniform, embeddings normal of variance 1 / width."""
        return self.init_from(backends.get(backend).generator(seed, dtype))

    def init_from(self, rng: Generator) -> TransformerParams:
        """Initial parameters, drawn from `rng`."""

        def embedding(config: EmbedConfig) -> EmbedParams:
            std = config.width**-0.5
            return config.init(rng, draw=lambda rng, shape: normal(rng, shape, std=std))

        config = self.block_config
        shape = (self.d_model, self.tgt_vocab_size)
        return TransformerParams(
            embedding(self.src_embed),
            embedding(self.tgt_embed),
            StackParams.init(rng, config, self.n_encoder_layers),
            StackParams.init(
                rng, config, self.n_decoder_layers, cross=True, shared_memory=self.shared_memory
            ),
            None
            if self.tied
            else LinearParams.init(rng, shape, draw=xavier_uniform, bias=self.bias),
        )

    def encode(
        self, params: TransformerParams, src: Array, *, dropout_key: ops.Key | None = None
    ) -> tuple[tuple[Array, Array | None], EncodeCache]:
        """The encoder's output for a source: src (B, S) -> memory (B, S, D), and its positions."""
        require_params("encoder", params.encoder, self.n_encoder_layers, self.norm, None, True)
        keys = dropout_streams(dropout_key, self.n_encoder_layers)
        (x, pos), embed_cache = embed(
            params.src_embed, ids=src, config=self.src_embed, dropout_key=keys[0]
        )
        memory, stack_cache = stack(
            x,
            params.encoder,
            pos=pos,
            config=self.block_config,
            mask=self._mask(src),
            dropout_key=keys[1],
        )
        return (memory, pos), EncodeCache(embed_cache, stack_cache)

    def decode(
        self,
        params: TransformerParams,
        memory: Array,
        memory_pos: Array | None,
        src: Array,
        tgt: Array,
        *,
        dropout_key: ops.Key | None = None,
    ) -> tuple[Array, DecodeCache]:
        """Logits of the token after each of tgt (B, T), given the encoded source: (B, T, V)."""
        require_params(
            "decoder", params.decoder, self.n_decoder_layers, self.norm, params.head, self.tied
        )
        keys = dropout_streams(dropout_key, self.n_decoder_layers)
        (x, pos), embed_cache = embed(
            params.tgt_embed, ids=tgt, config=self.tgt_embed, dropout_key=keys[0]
        )
        x, stack_cache = stack(
            x,
            params.decoder,
            memory,
            None,
            pos,
            memory_pos,
            config=self.block_config,
            mask=self._mask(tgt),
            causal=True,
            memory_mask=self._mask(src),
            dropout_key=keys[1],
        )
        logits, head_cache = output_head(x, params.head, params.tgt_embed.table)
        return logits, DecodeCache(embed_cache, stack_cache, head_cache)

    def forward(
        self,
        params: TransformerParams,
        src: Array,
        tgt: Array,
        *,
        dropout_key: ops.Key | None = None,
    ) -> tuple[Array, TransformerCache]:
        """Logits of the token after each of tgt.

        src: (B, S) ids of the source vocabulary   tgt: (B, T) ids of the target's
        logits: (B, T, V). dropout_key None: no dropout. ValueError, TypeError for other ids.
        """
        _require_batches(src, tgt)
        (memory, memory_pos), encode_cache = self.encode(params, src, dropout_key=dropout_key)
        decode_key = dropout_key and dropout_key.at(SITES * self.n_encoder_layers + 1)
        logits, decode_cache = self.decode(
            params, memory, memory_pos, src, tgt, dropout_key=decode_key
        )
        return logits, TransformerCache(encode_cache, decode_cache)

    def loss(
        self,
        params: TransformerParams,
        src: Array,
        tgt: Array,
        *,
        dropout_key: ops.Key | None = None,
        **options: Any,
    ) -> tuple[Array, LossCache]:
        """Mean cross-entropy in nats of tgt[:, 1:] after tgt[:, :-1]; padding does not count.

        tgt: (B, T + 1), from start to end token. options: those of `ops.cross_entropy`.
        """
        _require_batches(src, tgt)
        if tgt.shape[1] < 2:
            raise ValueError(f"loss: tgt must hold at least 2 tokens, got shape {tuple(tgt.shape)}")
        logits, cache = self.forward(params, src, tgt[:, :-1], dropout_key=dropout_key)
        return token_loss(logits, cache, tgt[:, 1:], {"ignore_index": self.pad_id, **options})

    def generate(
        self, params: TransformerParams, src: Array, *, start_id: int, end_id: int, max_new: int
    ) -> Array:
        """Greedy decoding: (B, up to max_new) ids, each row up to its end token, then padding.

        ValueError where start_id or end_id is not in the target's vocabulary. Looks at the ids
        after each step, to stop early: not for use under `jax.jit`.
        """
        require_id("generate", self.tgt_vocab_size, start_id=start_id, end_id=end_id)
        require_sizes("generate", 0, max_new=max_new)
        require_tokens("generate", "src", src)
        xp = array_namespace(src)
        (memory, memory_pos), _ = self.encode(params, src)
        src = as_indices(src)
        tgt = xp.full((src.shape[0], 1), start_id, dtype=src.dtype, device=device(src))
        done = xp.zeros_like(tgt[:, 0], dtype=xp.bool)
        is_pad = xp.arange(self.tgt_vocab_size, device=device(src)) == self.pad_id  # (V,)
        for _ in range(min(max_new, self.max_len)):
            logits, _ = self.decode(params, memory, memory_pos, src, tgt)
            scores = xp.where(is_pad, -xp.inf, logits[:, -1, :])
            best = xp.astype(xp.argmax(scores, axis=-1), src.dtype)
            best = xp.where(done, self.pad_id, best)
            tgt = xp.concat([tgt, best[:, None]], axis=1)
            done = done | (best == end_id)
            if bool(xp.all(done)):
                break
        return tgt[:, 1:]

    def _mask(self, ids: Array) -> Array:
        """Which keys may be attended to: (B, 1, 1, S)."""
        return (as_indices(ids) != self.pad_id)[:, None, None, :]


class TransformerParams(NamedTuple):
    """Parameters of a Transformer."""

    src_embed: EmbedParams
    tgt_embed: EmbedParams
    encoder: StackParams
    decoder: StackParams
    head: LinearParams | None  # (D, V); None: tied to tgt_embed.table


class EncodeCache(NamedTuple):
    """What `Transformer.encode` keeps for its backward."""

    embed: Any
    stack: Any

    def backward(self, dmemory: Array, dpos: Array | None) -> tuple[EmbedParams, StackParams]:
        """Gradients of the source's embedding and of the encoder."""
        dx, dencoder, _, _, dself_pos, _ = self.stack.backward(dmemory)
        if dself_pos is not None and dpos is not None:
            dself_pos = dself_pos + dpos
        return self.embed.backward(dx, dself_pos), dencoder


class DecodeCache(NamedTuple):
    """What `Transformer.decode` keeps for its backward."""

    embed: Any
    stack: Any
    head: OutputHeadCache

    def backward(self, dlogits: Array) -> tuple[Any, ...]:
        """Gradients of the target's embedding, decoder, head, memory and memory's positions."""
        dx, dhead, dtable = self.head.backward(dlogits)
        dx, ddecoder, dmemory, _, dpos, dmemory_pos = self.stack.backward(dx)
        dembed = self.embed.backward(dx, dpos)
        if dtable is not None:
            dembed = dembed._replace(table=dembed.table + dtable)
        return dembed, ddecoder, dhead, dmemory, dmemory_pos


class TransformerCache(NamedTuple):
    """What `Transformer.forward` keeps for its backward."""

    encode: EncodeCache
    decode: DecodeCache

    def backward(self, dlogits: Array) -> TransformerParams:
        """Gradients of params."""
        dtgt_embed, ddecoder, dhead, dmemory, dmemory_pos = self.decode.backward(dlogits)
        dsrc_embed, dencoder = self.encode.backward(dmemory, dmemory_pos)
        return TransformerParams(dsrc_embed, dtgt_embed, dencoder, ddecoder, dhead)


def _require_batches(src: Array, tgt: Array) -> None:
    require_tokens("Transformer", "src", src)
    require_tokens("Transformer", "tgt", tgt)
    if src.shape[0] != tgt.shape[0]:
        raise ValueError(
            f"Transformer: src and tgt must have one batch size, got {src.shape[0]} "
            f"and {tgt.shape[0]}"
        )
