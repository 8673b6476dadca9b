"""An encoder-decoder: the model of arXiv:1706.03762, or T5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from xformer import ops
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import inference, registry, saved
from xformer.dispatch.backend import Backend, Generator
from xformer.dispatch.checks import as_indices, number, plain_numbers, require_id, require_tokens
from xformer.dispatch.grad_callback import Ready, below, report
from xformer.dispatch.shapes import require_array
from xformer.initializers import normal, xavier_uniform
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.block import BlockConfig
from xformer.layers.embed import EmbedConfig, EmbedParams
from xformer.layers.protocol import SITES, Context, SideInputs, plus
from xformer.layers.relative import RelativeConfig
from xformer.layers.stack import (
    StackParams,
    dropout_streams,
    memory_of,
    require_configs,
    require_stack,
    stack,
)
from xformer.models.language_model import (
    HiddenCache,
    LanguageModel,
    LanguageModelParams,
    embedded,
)
from xformer.models.lm_head import LMHead, logits_of
from xformer.models.loss import LossCache
from xformer.models.state import DecodeState, key_mask
from xformer.models.usage import in_short, not_called, require_params

Top = Callable[[Array, Any, Any], tuple[Array, Any]]  # (x, its parameters, table) -> (y, cache)
Masks = tuple[Array | None, Array | None]  # of the source and of the target


@dataclass(frozen=True)
class EncoderDecoder:
    """The configuration of a model from two sequences to logits, or hidden states without a head.

    A sequence is (B, T) token ids; vectors (B, T, D) if its embedding is None.

    pad_id: without a mask, attention ignores this id; the loss ignores targets with this id. A
        target must not begin with it. None: there is no such id
    shared_embed: source and target have the same embedding
    shared_memory: one key/value projection of the encoder's output for all layers of the decoder

    ValueError for parts that do not fit together.
    """

    encoder: tuple[BlockConfig, ...]  # one for each layer
    decoder: tuple[BlockConfig, ...]
    src_embed: EmbedConfig | None = None
    tgt_embed: EmbedConfig | None = None
    shared_embed: bool = False
    encoder_relative_bias: RelativeConfig | None = None
    decoder_relative_bias: RelativeConfig | None = None
    # A final norm; None: True unless the blocks are post-LN or without norms.
    encoder_norm: bool | None = None
    decoder_norm: bool | None = None
    shared_memory: bool = False
    head: LMHead | None = None
    pad_id: int | None = None
    out_dropout: float = 0.0  # of the encoder's and of the decoder's output
    # Each block saves only its input, and runs again in backward.
    activation_checkpointing: bool = False
    # config.json and generation_config.json of a pretrained model
    hf_config: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    generation_config: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)

    __call__ = not_called
    __repr__ = in_short

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_configs("EncoderDecoder", self.encoder)
        require_configs("EncoderDecoder", self.decoder)
        if any(config.attn.xl for config in (*self.encoder, *self.decoder)):
            raise ValueError("EncoderDecoder: attn.xl is for decoder-only models")
        if not all(isinstance(config.attn, AttentionConfig) for config in self.decoder):
            raise ValueError(
                "EncoderDecoder: a decoder's attn must be an AttentionConfig: others have no "
                "cross-attention"
            )
        if self.decoder[0].reversible:
            raise ValueError("EncoderDecoder: a decoder's blocks cannot be reversible")
        if self.encoder[0].reversible and self.activation_checkpointing:
            raise ValueError(
                "EncoderDecoder: activation_checkpointing excludes reversible blocks, which save "
                "less"
            )
        if self.shared_embed and (self.src_embed is None or self.tgt_embed is not None):
            raise ValueError("EncoderDecoder: shared_embed needs src_embed and no tgt_embed")
        for name, config, blocks in (
            ("src_embed", self.src_embed, self.encoder),
            ("tgt_embed", self.target_embed, self.decoder),
        ):
            if config is not None and config.d_model != blocks[0].d_model:
                raise ValueError(
                    f"EncoderDecoder: {name}.d_model must be that of the blocks, "
                    f"{blocks[0].d_model}, got {config.d_model}"
                )
        if self.head is not None:
            table, width = self.target_embed, self.decoder[0].d_model
            if table is None or (self.head.tied and table.width != width):
                got = None if table is None else table.width
                raise ValueError(
                    f"EncoderDecoder: a tied head needs the target's embedding of width d_model "
                    f"= {width}, any head needs its vocabulary, got {got}"
                )
        if self.pad_id is not None:
            sizes = (size for size in self.id_sizes if size is not None)
            require_id("EncoderDecoder", min(sizes, default=0), pad_id=self.pad_id)
        number("EncoderDecoder", "out_dropout", self.out_dropout, low=0, high=1)

    @property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """The configurations of all layers: first the encoder's, then the decoder's."""
        return (*self.encoder, *self.decoder)

    @property
    def target_embed(self) -> EmbedConfig | None:
        """The configuration of the target's embedding."""
        return self.src_embed if self.shared_embed else self.tgt_embed

    @property
    def id_sizes(self) -> tuple[int | None, ...]:
        """The number of ids of src, tgt and targets in `loss`; None if it takes no ids there."""
        src, tgt = (
            None if e is None else e.vocab_size for e in (self.src_embed, self.target_embed)
        )
        return src, tgt, tgt

    def init(
        self, seed: int = 0, backend: str | Backend = "numpy", dtype: str = "float32"
    ) -> EncoderDecoderParams:
        """Initial parameters: Xavier uniform; embeddings normal with variance 1 / width."""
        return self.init_from(registry.get(backend).generator(seed, dtype))

    def init_from(self, rng: Generator) -> EncoderDecoderParams:
        """Initial parameters as from `init`, with random numbers, backend and dtype of `rng`."""

        def embedding(config: EmbedConfig | None) -> EmbedParams | None:
            if config is None:
                return None
            return config.init(rng, draw=partial(normal, std=config.width**-0.5))

        src, tgt = embedding(self.src_embed), embedding(self.tgt_embed)
        encoder, decoder = self._source.init_stack(rng), self._target.init_stack(rng)
        head = None
        if self.head is not None:
            width = self.decoder[0].d_model
            head = self.head.init(rng, width, self.target_embed, draw=xavier_uniform)
        return EncoderDecoderParams(src, tgt, encoder, decoder, head)

    def encode(
        self,
        params: EncoderDecoderParams,
        src: Array,
        *,
        src_mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[tuple[Array, Array | None], EncodeCache]:
        """The pair (memory, pos) of the source, and the cache.

        memory: (B, S, D), the encoder's output
        pos: (S, K), vectors of the source's positions, which cross-attention adds to keys and
            values; None unless the mode of the source's embedding is "qkv"
        Both are arguments of `decode_target`.

        src: (B, S) ids, or vectors (B, S, D)
        src_mask: (B, S), True = a token, False = padding; None: by pad_id
        dropout_key: None: no dropout
        """
        require_params("EncoderDecoder", params, EncoderDecoderParams)
        own = LanguageModelParams(params.src_embed, params.encoder, None)
        context = Context(src_mask, dropout_key=dropout_key)
        encoded, cache = self._source.run(own, src, SideInputs(), context)
        return encoded, saved(EncodeCache(*cache))

    def decode_target(
        self,
        params: EncoderDecoderParams,
        memory: Array,
        memory_pos: Array | None,
        tgt: Array,
        *,
        src_mask: Array | None = None,
        tgt_mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, DecodeCache]:
        """Logits (B, T, V) of the token after each of `tgt`; hidden states without a head.

        memory, memory_pos: as `encode` returned them
        tgt: (B, T) ids, or vectors (B, T, D)
        src_mask: (B, S), True = a token, False = padding; None: no padding
        tgt_mask: (B, T), likewise; None: by pad_id
        dropout_key: None: no dropout
        ValueError without src_mask if there is a pad_id: memory does not say what is padding.
        """
        if src_mask is None and self.pad_id is not None:
            raise ValueError("decode_target: a model with a pad_id needs src_mask, got None")
        top, masks = partial(logits_of, "EncoderDecoder", self.head), (src_mask, tgt_mask)
        return self._decode_target(top, params, (memory, memory_pos), tgt, masks, dropout_key)

    def _decode_target(
        self,
        top: Top,
        params: EncoderDecoderParams,
        encoded: tuple[Array, Array | None],
        tgt: Array,
        masks: Masks,
        dropout_key: ops.RandomKey | None,
    ) -> tuple[Array, DecodeCache]:
        """`decode_target` with `top` instead of the head. encoded: as `encode` returned it."""
        own = self._target_params(params)
        (memory, memory_pos), (src_mask, tgt_mask) = encoded, masks
        side = SideInputs(memory, memory_pos=memory_pos)
        context = Context(tgt_mask, True, src_mask, dropout_key=dropout_key)
        (x, _), cache = self._target.run(own, tgt, side, context)
        y, head_cache = top(x, own.head, None if own.embed is None else own.embed.table)
        return y, saved(DecodeCache(*cache, head_cache))

    def forward(
        self,
        params: EncoderDecoderParams,
        src: Array,
        tgt: Array,
        *,
        src_mask: Array | None = None,
        tgt_mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, EncoderDecoderCache]:
        """Logits (B, T, V) of the token after each of `tgt`; hidden states without a head.

        src: (B, S) ids in the source vocabulary, or vectors (B, S, D)
        tgt: (B, T) ids in the target vocabulary, or vectors (B, T, D)
        src_mask, tgt_mask: (B, S), (B, T), True = a token, False = padding; None: by pad_id
        dropout_key: None: no dropout
        ValueError or TypeError for other arguments.
        """
        top, masks = partial(logits_of, "EncoderDecoder", self.head), (src_mask, tgt_mask)
        return self._forward(top, params, src, tgt, masks, dropout_key)

    def _forward(
        self,
        top: Top,
        params: EncoderDecoderParams,
        src: Array,
        tgt: Array,
        masks: Masks,
        dropout_key: ops.RandomKey | None,
    ) -> tuple[Array, EncoderDecoderCache]:
        """`forward` with `top` instead of the head."""
        require_array("EncoderDecoder", "src", src)
        require_array("EncoderDecoder", "tgt", tgt)
        if src.shape[:1] != tgt.shape[:1]:
            raise ValueError(
                "EncoderDecoder: src and tgt must have one batch size, got shapes "
                f"{tuple(src.shape)} and {tuple(tgt.shape)}"
            )
        masks = self._source.is_token(src, masks[0]), masks[1]
        encoded, encode_cache = self.encode(params, src, src_mask=masks[0], dropout_key=dropout_key)
        # The encoder's blocks, embedding and output use the streams before these.
        decode_key = dropout_key and dropout_key.at(SITES * len(self.encoder) + 2)
        y, decode_cache = self._decode_target(top, params, encoded, tgt, masks, decode_key)
        return y, saved(EncoderDecoderCache(encode_cache, decode_cache, self.shared_embed))

    @cached_property
    def _source(self) -> _Part:
        """The encoder."""
        return self._part("encoder", self.src_embed, sequence="src", causal=False, head=None)

    @cached_property
    def _target(self) -> _Part:
        """The decoder with its head."""
        options: Any = {"head": self.head, "shared_memory": self.shared_memory}
        return self._part("decoder", self.target_embed, sequence="tgt", **options)

    def _part(self, name: str, embed: EmbedConfig | None, **options: Any) -> _Part:
        return _Part(
            embed,
            getattr(self, name),
            final_norm=getattr(self, f"{name}_norm"),
            relative_bias=getattr(self, f"{name}_relative_bias"),
            out_dropout=self.out_dropout,
            activation_checkpointing=self.activation_checkpointing,
            pad_id=self.pad_id,
            **options,
        )

    def _target_params(self, params: EncoderDecoderParams) -> LanguageModelParams:
        """The parameters of the decoder. TypeError for another type."""
        require_params("EncoderDecoder", params, EncoderDecoderParams)
        embedding = params.src_embed if self.shared_embed else params.tgt_embed
        return LanguageModelParams(embedding, params.decoder, params.head)

    @inference()
    def init_state(
        self, params: EncoderDecoderParams, src: Array, *, src_mask: Array | None = None
    ) -> DecodeState:
        """The state of a source and an empty target, for `decode`.

        It has the keys and values of the encoded source for each layer of the decoder.
        src: (B, S) ids, or vectors (B, S, D)
        src_mask: (B, S), True = a token, False = padding; None: by pad_id
        ValueError if params do not fit the configuration.
        """
        self._target._require_stack(self._target_params(params))
        src_mask = self._source.is_token(src, src_mask)
        (memory, memory_pos), _ = self.encode(params, src, src_mask=src_mask)
        sources = memory_of(params.decoder, memory, memory_pos, configs=self.decoder)
        return self._target.init_state()._replace(memory=sources, src_mask=src_mask)

    @property
    def context(self) -> int | None:
        """The most tokens of a target; None if only memory limits it."""
        return self._target.context

    def truncate(self, state: DecodeState, n: int) -> DecodeState:
        """`state` without the last `n` tokens of its target (`LanguageModel.truncate`)."""
        return self._target.truncate(state, n)

    def decode(
        self,
        params: EncoderDecoderParams,
        tokens: Array,
        state: DecodeState,
        *,
        all_logits: bool = False,
    ) -> tuple[Array, DecodeState]:
        """Logits (B, V) after the last of `tokens`, and the state that includes them.

        There is no backward.

        tokens: (B, T) integers in [0, V), the next tokens of each target
        state: of the source and the target before; for a static one see `LanguageModel.decode`
        all_logits: return the logits after each token, (B, T, V)

        ValueError if the model has no embedding or head, or if the tokens do not fit max_len.
        """
        own = self._target_params(params)
        return self._target.decode(own, tokens, state, all_logits=all_logits)

    def loss(
        self,
        params: EncoderDecoderParams,
        src: Array,
        tgt: Array,
        targets: Array,
        *,
        src_mask: Array | None = None,
        tgt_mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, LossCache[EncoderDecoderParams]]:
        """The mean cross-entropy in nats of `targets`, the token after each of `tgt`.

        targets: (B, T) ids in the target vocabulary
        options: of `ops.cross_entropy`; ignore_index is pad_id if there is one
        For the other arguments and errors see `forward`. ValueError without a head.
        """
        if self.head is None:
            raise ValueError("EncoderDecoder: a loss needs a head, got none")
        if self.pad_id is not None:
            options = {"ignore_index": self.pad_id} | options
        top = partial(self.head.loss, targets=targets, **options)
        masks = src_mask, tgt_mask
        loss, cache = self._forward(top, params, src, tgt, masks, dropout_key)
        return loss, LossCache(cache, loss)


@short
class EncoderDecoderParams(NamedTuple):
    """Parameters of an EncoderDecoder."""

    src_embed: EmbedParams | None
    tgt_embed: EmbedParams | None  # None also if it is shared with the source
    encoder: StackParams
    decoder: StackParams
    head: Any  # (D, V); None: tied to the target's embedding


@dataclass(frozen=True)
class _Part(LanguageModel):
    """The encoder, or the decoder with its head, as the language model of one sequence.

    Unlike in other language models, padding counts in positions.
    """

    sequence: str = "src"  # that the encoder reads; "tgt": that the decoder reads
    pad_id: int | None = None  # of `EncoderDecoder`
    shared_memory: bool = False  # of `EncoderDecoder`

    def init_stack(self, rng: Generator) -> StackParams:
        """Initial parameters of the blocks."""
        return StackParams.init(
            rng,
            self.blocks,
            final_norm=self.final_norm,
            cross=self.sequence == "tgt",
            shared_memory=self.shared_memory,
            relative_bias=self.relative_bias,
        )

    def run(
        self, params: LanguageModelParams, x: Array, side: SideInputs, context: Context
    ) -> tuple[tuple[Array, Array | None], HiddenCache]:
        """The hidden states (B, T, D) of x, and its positions if the heads need them.

        context.mask, memory_mask: (B, T) and (B, S), True = a token, False = padding; without a
            mask, tokens are by pad_id
        """
        self._require_stack(params)
        keys = dropout_streams(context.dropout_key, len(self.blocks))
        (y, pos), embed_cache = embedded(
            "EncoderDecoder", self.sequence, x, params.embed, self.embed, dropout_key=keys[0]
        )
        is_token = self.is_token(x, context.mask)
        mask = key_mask("EncoderDecoder", f"{self.sequence}_mask", is_token, x)
        memory_mask = key_mask("EncoderDecoder", "src_mask", context.memory_mask, side.memory)
        y, stack_cache = stack(
            y,
            params.stack,
            side._replace(pos=pos),
            configs=self.blocks,
            context=context._replace(mask=mask, memory_mask=memory_mask, dropout_key=keys[1]),
            relative_bias=self.relative_bias,
            dropout_rate=self.out_dropout,
            activation_checkpointing=self.activation_checkpointing,
        )
        return (y, pos), HiddenCache(embed_cache, stack_cache)

    def is_token(self, x: Array, mask: Array | None) -> Array | None:
        """`mask`; if it is None, (B, T) with True where x is not pad_id, if there is one."""
        if mask is not None or self.pad_id is None or self.embed is None:
            return mask
        require_tokens("EncoderDecoder", self.sequence, x)
        return as_indices(x) != self.pad_id

    def _require_stack(self, params: LanguageModelParams) -> None:
        """ValueError unless params.stack fits the configuration."""
        name = {"src": "encoder", "tgt": "decoder"}[self.sequence]
        options: Any = {"cross": name == "decoder", "shared_memory": self.shared_memory}
        own: Any = params.stack, self.blocks, self.final_norm, len(self.blocks)
        require_stack(name, f"params.{name}", *own, **options)


@short
class EncodeCache(NamedTuple):
    """Saved by `EncoderDecoder.encode` for backward: the caches of the embedding and encoder."""

    embed: Any  # of `layers.embed`; None: src has vectors instead of token ids
    stack: Any  # of `layers.stack`

    def backward(
        self, dmemory: Array, dpos: Array | None, *, ready: Ready | None = None
    ) -> tuple[Any, ...]:
        """Gradients of params.src_embed, params.encoder and src, in that order.

        The first is None if src are vectors, the last is None if src are ids.

        dmemory: (B, S, D), the gradient of the encoder's output
        dpos: (S, K), the gradient of the positions' vectors from cross-attention, or None
        ready: called with the name and the gradients of each part of the encoder
            ("encoder.blocks.0", "encoder.norm", ...), as soon as they are complete
        """
        dx, dencoder, dside = self.stack.backward(dmemory, ready=below(ready, "encoder"))
        dpos = dside.plus(SideInputs(pos=dpos)).pos
        dembed = None if self.embed is None else self.embed.backward(dx, dpos)
        return dembed, dencoder, dx if self.embed is None else None


@short
class DecodeCache(NamedTuple):
    """Saved by `decode_target` for backward: the caches of embedding, decoder and head."""

    embed: Any  # of `layers.embed`; None: tgt has vectors instead of token ids
    stack: Any  # of `layers.stack`
    head: Any  # of the head, or of its loss; None: no head

    def backward(self, dy: Array, *, ready: Ready | None = None) -> tuple[Any, ...]:
        """Gradients of embedding, decoder, head, memory, memory_pos and tgt, in that order.

        These may be None: the embedding if tgt are vectors; tgt if tgt are ids; the head if there
        is none or if it is tied without parameters; memory_pos if decode_target got None for it.

        dy: the gradient of the logits (B, T, V), or of the hidden states (B, T, D) without a head;
            for a loss, the gradient () of the loss
        ready: called with the name and the gradients of the head and of each part of the decoder
            ("head", "decoder.blocks.0", ...), as soon as they are complete
        """
        dhead = dtable = None
        if self.head is not None:
            dy, dhead, dtable = self.head.backward(dy)
            report(ready, "head", dhead)
        dx, ddecoder, dside = self.stack.backward(dy, ready=below(ready, "decoder"))
        dembed = None if self.embed is None else self.embed.backward(dx, dside.pos)
        if dtable is not None and dembed is not None:
            dembed = dembed._replace(table=dembed.table + dtable)
        dtgt = dx if self.embed is None else None
        return dembed, ddecoder, dhead, dside.memory, dside.memory_pos, dtgt


@short
class EncoderDecoderCache(NamedTuple):
    """Saved by `EncoderDecoder.forward` and `loss` for backward. For a loss, dy is dloss."""

    encode: EncodeCache
    decode: DecodeCache
    shared_embed: bool

    def backward(self, dy: Array, *, ready: Ready | None = None) -> EncoderDecoderParams:
        """Gradients of params.

        dy: the gradient of the logits (B, T, V), or of the hidden states (B, T, D) without a head;
            for a loss, the gradient () of the loss
        ready: called with the name and the gradients of each part of params ("head",
            "decoder.blocks.0", "src_embed", ...), as soon as they are complete
        """
        return self.backward_all(dy, ready=ready)[0]

    def backward_all(
        self, dy: Array, *, ready: Ready | None = None
    ) -> tuple[EncoderDecoderParams, Array | None, Array | None]:
        """Gradients of params, src and tgt; None for src and tgt of token ids.

        dy, ready: see `backward`
        """
        dtgt_embed, ddecoder, dhead, dmemory, dmemory_pos, dtgt = self.decode.backward(
            dy, ready=ready
        )
        if not self.shared_embed:
            report(ready, "tgt_embed", dtgt_embed)
        dsrc_embed, dencoder, dsrc = self.encode.backward(dmemory, dmemory_pos, ready=ready)
        if self.shared_embed:
            dsrc_embed = plus(dsrc_embed, dtgt_embed)
            dtgt_embed = None
        report(ready, "src_embed", dsrc_embed)
        return EncoderDecoderParams(dsrc_embed, dtgt_embed, dencoder, ddecoder, dhead), dsrc, dtgt
