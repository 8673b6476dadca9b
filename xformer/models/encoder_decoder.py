"""An encoder-decoder: the model of arXiv:1706.03762, or T5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from array_api_compat import device

from xformer import ops
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import inference, registry, saved
from xformer.dispatch.backend import Backend, Generator
from xformer.dispatch.checks import (
    as_indices,
    number,
    plain_numbers,
    require_id,
    require_mask,
    require_tokens,
    require_vectors,
)
from xformer.dispatch.grad_callback import Ready, below, report
from xformer.dispatch.shapes import require_array
from xformer.initializers import normal, xavier_uniform
from xformer.layers.advance import advance
from xformer.layers.attention import KeyValue
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.block import BlockConfig
from xformer.layers.embed import EmbedConfig, EmbedParams, embed
from xformer.layers.kv_cache import KVCache, require_rows, truncated
from xformer.layers.protocol import SITES, Context, SideInputs
from xformer.layers.relative import RelativeConfig
from xformer.layers.stack import (
    StackParams,
    dropout_streams,
    memory_of,
    require_configs,
    require_stack,
    stack,
)
from xformer.models.lm_head import LMHead, require_present
from xformer.models.loss import LossCache
from xformer.models.state import DecodeState
from xformer.models.usage import in_short, not_called, require_params

Top = Callable[[Array, Any, Any], tuple[Array, Any]]  # (x, its parameters, table) -> (y, cache)


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
        encoder = StackParams.init(
            rng,
            self.encoder,
            final_norm=self.encoder_norm,
            relative_bias=self.encoder_relative_bias,
        )
        decoder = StackParams.init(
            rng,
            self.decoder,
            final_norm=self.decoder_norm,
            relative_bias=self.decoder_relative_bias,
            cross=True,
            shared_memory=self.shared_memory,
        )
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
        n_layers = len(self.encoder)
        require_params("EncoderDecoder", params, EncoderDecoderParams)
        require_stack(
            "encoder", "params.encoder", params.encoder, self.encoder, self.encoder_norm, n_layers
        )
        keys = dropout_streams(dropout_key, n_layers)
        (x, pos), embed_cache = _embedded("src", params.src_embed, self.src_embed, src, keys[0])
        src_mask = self._mask("src", src_mask, src, self.src_embed)
        memory, stack_cache = stack(
            x,
            params.encoder,
            SideInputs(pos=pos),
            configs=self.encoder,
            context=Context(_key_mask("src_mask", src_mask, src), dropout_key=keys[1]),
            relative_bias=self.encoder_relative_bias,
            dropout_rate=self.out_dropout,
            activation_checkpointing=self.activation_checkpointing,
        )
        return (memory, pos), saved(EncodeCache(embed_cache, stack_cache))

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
        masks = {"src_mask": src_mask, "tgt_mask": tgt_mask}
        return self._decode_target(
            self._logits, params, memory, memory_pos, tgt, dropout_key=dropout_key, **masks
        )

    def _logits(self, x: Array, params: Any, table: Any) -> tuple[Array, Any]:
        """The head's logits; the hidden states unchanged if there is no head."""
        if self.head is None:
            require_present("EncoderDecoder", "params.head", params, False)
            return x, None
        return self.head.forward(x, params, table)

    def _decode_target(
        self,
        top: Top,
        params: EncoderDecoderParams,
        memory: Array,
        memory_pos: Array | None,
        tgt: Array,
        *,
        src_mask: Array | None,
        tgt_mask: Array | None,
        dropout_key: ops.RandomKey | None,
    ) -> tuple[Array, DecodeCache]:
        """`decode_target` with `top` instead of the head."""
        n_layers = len(self.decoder)
        self._require_decoder(params)
        keys = dropout_streams(dropout_key, n_layers)
        embedding: Any = params.src_embed if self.shared_embed else params.tgt_embed
        (x, pos), embed_cache = _embedded("tgt", embedding, self.target_embed, tgt, keys[0])
        tgt_mask = self._mask("tgt", tgt_mask, tgt, self.target_embed)
        masks = _key_mask("tgt_mask", tgt_mask, tgt), _key_mask("src_mask", src_mask, memory)
        x, stack_cache = stack(
            x,
            params.decoder,
            SideInputs(memory, None, pos, memory_pos),
            configs=self.decoder,
            context=Context(masks[0], True, masks[1], dropout_key=keys[1]),
            relative_bias=self.decoder_relative_bias,
            dropout_rate=self.out_dropout,
            activation_checkpointing=self.activation_checkpointing,
        )
        y, head_cache = top(x, params.head, None if embedding is None else embedding.table)
        return y, saved(DecodeCache(embed_cache, stack_cache, head_cache))

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
        masks = {"src_mask": src_mask, "tgt_mask": tgt_mask}
        return self._forward(self._logits, params, src, tgt, dropout_key=dropout_key, **masks)

    def _forward(
        self,
        top: Top,
        params: EncoderDecoderParams,
        src: Array,
        tgt: Array,
        *,
        src_mask: Array | None,
        tgt_mask: Array | None,
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
        src_mask = self._mask("src", src_mask, src, self.src_embed)
        (memory, memory_pos), encode_cache = self.encode(
            params, src, src_mask=src_mask, dropout_key=dropout_key
        )
        # The encoder's blocks, embedding and output use the streams before these.
        decode_key = dropout_key and dropout_key.at(SITES * len(self.encoder) + 2)
        y, decode_cache = self._decode_target(
            top,
            params,
            memory,
            memory_pos,
            tgt,
            src_mask=src_mask,
            tgt_mask=tgt_mask,
            dropout_key=decode_key,
        )
        return y, saved(EncoderDecoderCache(encode_cache, decode_cache, self.shared_embed))

    def _mask(
        self, name: str, mask: Array | None, x: Array, embed: EmbedConfig | None
    ) -> Array | None:
        """`mask`; if it is None, (B, T) with True where x is not pad_id, if there is one."""
        if mask is not None or self.pad_id is None or embed is None:
            return mask
        require_tokens("EncoderDecoder", name, x)
        return as_indices(x) != self.pad_id

    def _require_decoder(self, params: EncoderDecoderParams) -> None:
        """ValueError unless params.decoder fits the configuration. TypeError for another type."""
        require_params("EncoderDecoder", params, EncoderDecoderParams)
        require_stack(
            "decoder",
            "params.decoder",
            params.decoder,
            self.decoder,
            self.decoder_norm,
            len(self.decoder),
            cross=True,
            shared_memory=self.shared_memory,
        )

    @inference()
    def init_state(
        self, params: EncoderDecoderParams, src: Array, *, src_mask: Array | None = None
    ) -> EncoderDecoderState:
        """The state of a source and an empty target, for `decode`.

        It has the keys and values of the encoded source for each layer of the decoder.
        src: (B, S) ids, or vectors (B, S, D)
        src_mask: (B, S), True = a token, False = padding; None: by pad_id
        ValueError if params do not fit the configuration.
        """
        self._require_decoder(params)
        src_mask = self._mask("src", src_mask, src, self.src_embed)
        (memory, memory_pos), _ = self.encode(params, src, src_mask=src_mask)
        sources = memory_of(params.decoder, memory, memory_pos, configs=self.decoder)
        return EncoderDecoderState((KVCache(),) * len(self.decoder), sources, src_mask)

    @property
    def context(self) -> int | None:
        """The most tokens of a target; None if only memory limits it."""
        config = self.target_embed
        return None if config is None or config.max_len is None else config.max_len - config.offset

    def truncate(self, state: EncoderDecoderState, n: int) -> EncoderDecoderState:
        """`state` without the last `n` tokens of its target.

        A static state is not checked: the n tokens must have been decoded after `preallocate`.

        ValueError, for other states, if there are fewer than n tokens, or if a layer's window has
        dropped keys that attention needs again.
        """
        if state.target.is_static:
            return state._replace(length=state.target.truncated_length(n))
        windows = [config.attn.window for config in self.decoder]
        kv_cache = truncated(state.kv_cache, windows, length=state.length, n=n)
        return state._replace(kv_cache=kv_cache, length=state.length - n)

    @inference()
    def decode(
        self,
        params: EncoderDecoderParams,
        tokens: Array,
        state: EncoderDecoderState,
        *,
        all_logits: bool = False,
    ) -> tuple[Array, EncoderDecoderState]:
        """Logits (B, V) after the last of `tokens`, and the state that includes them.

        There is no backward.

        tokens: (B, T) integers in [0, V), the next tokens of each target
        state: of the source and the target before; it stays unchanged, but if it is static
            (`EncoderDecoderState.preallocate`), its arrays may be overwritten, and it must have T
            free slots, which is not checked
        all_logits: return the logits after each token, (B, T, V)

        ValueError if the model has no embedding or head, or if the tokens do not fit max_len.
        """
        if self.head is None or self.target_embed is None:
            raise ValueError("decode: the model must have an embedding and a head")
        require_tokens("decode", "tokens", tokens)
        require_rows(tokens, state.memory[0].k.shape[0])
        target = state.target
        if target.is_static and self.context is not None and target.capacity > self.context:
            raise ValueError(
                f"decode: at most {self.context} tokens fit max_len, got {target.capacity} slots"
            )
        embedding: Any = params.src_embed if self.shared_embed else params.tgt_embed
        (x, pos), _ = embed(embedding, ids=tokens, config=self.target_embed, start=state.length)
        context = Context(
            target.key_mask(tokens.shape[1])[:, None, :, :] if target.is_static else None,
            memory_mask=_key_mask("src_mask", state.src_mask, state.memory[0].k[:, 0, :, :]),
            kv_cache=target.static_kv_cache() if target.is_static else state.kv_cache,
        )
        x, kv_cache = advance(
            x,
            params.decoder,
            SideInputs(state.memory, pos=pos),
            configs=self.decoder,
            context=context,
            n_cached=state.length,
            relative_bias=self.decoder_relative_bias,
        )
        logits, _ = self.head.forward(
            x if all_logits else x[:, -1:, :], params.head, embedding.table
        )
        target = target.appended(kv_cache, None, tokens)
        state = state._replace(kv_cache=target.kv_cache, length=target.length)
        return logits if all_logits else logits[:, 0, :], state

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
        masks = {"src_mask": src_mask, "tgt_mask": tgt_mask}
        loss, cache = self._forward(top, params, src, tgt, dropout_key=dropout_key, **masks)
        return loss, LossCache(cache, loss)


@short
class EncoderDecoderParams(NamedTuple):
    """Parameters of an EncoderDecoder."""

    src_embed: EmbedParams | None
    tgt_embed: EmbedParams | None  # None also if it is shared with the source
    encoder: StackParams
    decoder: StackParams
    head: Any  # (D, V); None: tied to the target's embedding


@short
class EncoderDecoderState(NamedTuple):
    """The state of decoding: the encoded source, and the KV caches of the target so far.

    `EncoderDecoder.init_state` makes it, and `EncoderDecoder.decode` reads and returns it.
    """

    kv_cache: Sequence[KVCache]  # for each layer of the decoder, the self-attention's KV cache
    memory: tuple[KeyValue, ...]  # for each layer, keys and values of the source
    src_mask: Array | None  # (B, S), True = a token, False = padding; None: no padding
    length: Any = 0  # tokens of the target; if the state is static, an integer array ()
    is_static: bool = False  # whether the KV cache is preallocated, as by `preallocate`

    @property
    def target(self) -> DecodeState:
        """The state of the target without the source."""
        return DecodeState(self.kv_cache, length=self.length, is_static=self.is_static)

    @property
    def capacity(self) -> int:
        """The number of slots of the target's KV cache."""
        return self.target.capacity

    def preallocate(self, n: int) -> EncoderDecoderState:
        """A copy with a preallocated KV cache of `n` slots for the target."""
        kv_cache, _, length, *_ = self.target.preallocate(n)
        return self._replace(kv_cache=kv_cache, length=length, is_static=True)

    def wider(self, n: int) -> EncoderDecoderState:
        """A copy with the source padded on the right to `n` slots. The mask hides the padding."""
        first = self.memory[0].k
        xp, (size, _, length, _) = array_namespace(first), first.shape
        distinct = {id(kv): kv for kv in self.memory}  # layers may share keys and values
        wide = {i: KeyValue(*KVCache(*kv).preallocate(n, length)[:2]) for i, kv in distinct.items()}
        is_token = xp.arange(n, device=device(first)) < length
        mask = xp.broadcast_to(is_token[None, :], (size, n))
        if self.src_mask is not None:
            rest = xp.zeros((size, n - length), dtype=xp.bool, device=device(first))
            mask = xp.concat([self.src_mask, rest], axis=1)
        return self._replace(memory=tuple(wide[id(kv)] for kv in self.memory), src_mask=mask)

    def rows(self, ids: Array) -> EncoderDecoderState:
        """The pairs `ids` (B',) of the batch, in this order."""

        def taken(a: Array) -> Array:
            return array_namespace(a).take(a, ids, axis=0)

        memory = tuple(KeyValue(taken(kv.k), taken(kv.v)) for kv in self.memory)
        mask = None if self.src_mask is None else taken(self.src_mask)
        kv_cache = tuple(kv_cache.rows(ids) for kv_cache in self.kv_cache)
        return EncoderDecoderState(kv_cache, memory, mask, self.length)


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
        dself_pos = dside.pos
        if dself_pos is not None and dpos is not None:
            dself_pos = dself_pos + dpos
        dembed = None if self.embed is None else self.embed.backward(dx, dself_pos)
        return dembed, dencoder, None if self.embed is not None else dx


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
        dtgt = None if self.embed is not None else dx
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
            dsrc_embed = tree.map(lambda a, b: a + b, dsrc_embed, dtgt_embed)
            dtgt_embed = None
        report(ready, "src_embed", dsrc_embed)
        return EncoderDecoderParams(dsrc_embed, dtgt_embed, dencoder, ddecoder, dhead), dsrc, dtgt


def _embedded(
    name: str,
    params: EmbedParams | None,
    config: EmbedConfig | None,
    x: Array,
    key: ops.RandomKey | None,
) -> tuple[tuple[Array, Array | None], Any]:
    """The embedded sequence, and its positions if the heads need them; vectors unchanged."""
    require_present("EncoderDecoder", f"params.{name}_embed", params, config is not None)
    if params is None or config is None:
        require_vectors("EncoderDecoder", name, x)
        return (x, None), None
    require_tokens("EncoderDecoder", name, x)
    return embed(params, ids=x, config=config, dropout_key=key)


def _key_mask(name: str, mask: Array | None, x: Array) -> Array | None:
    """The mask of the keys, (B, 1, 1, S), which attention broadcasts over heads and queries.

    name: of the argument, for messages
    mask: (B, S), True = a token, False = padding; None: no padding, and the result is None
    x: the sequence, (B, S) or (B, S, ...)
    ValueError or TypeError for another mask.
    """
    if mask is None:
        return None
    require_mask("EncoderDecoder", name, mask, x)
    if tuple(mask.shape) != tuple(x.shape[:2]):
        raise ValueError(
            f"EncoderDecoder: {name} must be {tuple(x.shape[:2])}, got shape {tuple(mask.shape)}"
        )
    return mask[:, None, None, :]
