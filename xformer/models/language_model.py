"""A language model with one stack: a decoder such as GPT or Llama, or an encoder such as BERT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from array_api_compat import device

from xformer import layers, models, ops
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import inference, registry, saved
from xformer.dispatch.backend import Backend, Generator
from xformer.dispatch.checks import (
    number,
    plain_numbers,
    require_sizes,
    require_tokens,
    require_vectors,
)
from xformer.dispatch.grad_callback import Ready, below, report
from xformer.dispatch.shapes import require_array
from xformer.initializers import normal
from xformer.layers.block import BlockConfig
from xformer.layers.embed import EmbedConfig, EmbedParams, embed
from xformer.layers.kv_cache import Window, require_rows, truncated
from xformer.layers.protocol import SITES, Context, SideInputs
from xformer.layers.recurrent_state import RecurrentState, empty_cache, is_recurrent
from xformer.layers.rope_by_layer import (
    LayerTables,
    Rotary,
    distinct,
    max_unscaled_len,
    require_rotary,
    tables_of,
)
from xformer.layers.stack import (
    StackParams,
    dropout_streams,
    require_configs,
    require_stack,
    stack,
)
from xformer.models import decoding
from xformer.models.lm_head import LMHead, logits_of, require_present
from xformer.models.loss import LossCache
from xformer.models.router_loss import RouterLossCache, router_loss
from xformer.models.segment_memory import SegmentMemory
from xformer.models.state import DecodeState, key_mask, position_ids
from xformer.models.usage import in_short, not_called, require_params
from xformer.ops._loss import one

if TYPE_CHECKING:
    from xformer.models.pooled import PooledCache


@dataclass(frozen=True)
class LanguageModel:
    """The configuration of a model from tokens to logits, or to hidden states if head is None.

    If embed is None, the input is vectors (B, T, D) instead of tokens, and `init` cannot draw a
    head over a vocabulary, whose size is unknown. The parameters are separate data: `init` or
    `xformer.pretrained.load` returns them. Positions enter through the embedding, `rotary`,
    `alibi`, `relative_bias` or the blocks' attention (`AttentionConfig.xl`).

    With a mixture of experts, the loss also has `load_balancing_weight` times `ops.load_balancing`
    and `router_z_weight` times `ops.router_z_loss`, of the routers of all layers together.

    ValueError for parts that do not fit together.
    """

    embed: EmbedConfig | None
    blocks: tuple[BlockConfig, ...]  # one for each layer
    causal: bool = True
    # RoPE, of all layers or of each: a tuple with a RopeConfig or None (NoPE) a layer.
    rotary: Rotary = None
    alibi: bool = False
    relative_bias: layers.RelativeConfig | None = None
    final_norm: bool | None = None  # None: True unless the blocks are post-LN or without norms
    # The number of groups of layers with shared parameters (ALBERT); None: nothing is shared.
    n_shared_layer_groups: int | None = None
    head: models.Head | None = LMHead()  # noqa: RUF009 - frozen
    out_dropout: float = 0.0  # of the hidden states
    # M, the earlier positions that a segment attends to (Transformer-XL, `segment`, `decode`).
    memory_len: int | None = None  # None: no `segment`; `decode` attends to all earlier positions
    load_balancing_weight: float = 0.0
    router_z_weight: float = 0.0
    # Each block saves only its input, and runs again in backward.
    activation_checkpointing: bool = False
    # config.json and generation_config.json of a pretrained model
    hf_config: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    generation_config: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)

    __call__ = not_called
    __repr__ = in_short

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_configs("LanguageModel", self.blocks)
        width = self.d_model
        if self.embed is not None and self.embed.d_model != width:
            raise ValueError(
                f"LanguageModel: embed.d_model must be that of the blocks, {width}, "
                f"got {self.embed.d_model}"
            )
        if getattr(self.head, "tied", False) and self.embed is None:
            raise ValueError("LanguageModel: a tied head needs embed, got None")
        tied = isinstance(self.head, LMHead) and self.head.tied
        if tied and self.embed is not None and self.embed.width != width:
            raise ValueError(
                f"LanguageModel: a tied head needs embed.width = d_model = {width}, "
                f"got {self.embed.width}"
            )
        if self.n_shared_layer_groups is not None and (
            self.n_shared_layer_groups < 1 or len(self.blocks) % self.n_shared_layer_groups
        ):
            raise ValueError(
                f"LanguageModel: n_shared_layer_groups must divide {len(self.blocks)} layers, "
                f"got {self.n_shared_layer_groups}"
            )
        require_rotary("LanguageModel", self.rotary, len(self.blocks))
        self._require_xl()
        self._require_recurrent()
        if self.activation_checkpointing and self.blocks[0].reversible:
            raise ValueError(
                "LanguageModel: activation_checkpointing excludes reversible blocks, "
                "which save less"
            )
        if self.alibi and not self.causal:
            raise ValueError("LanguageModel: alibi needs causal attention: it favours later keys")
        number("LanguageModel", "out_dropout", self.out_dropout, low=0, high=1)
        for name in ("load_balancing_weight", "router_z_weight"):
            number("LanguageModel", name, getattr(self, name), low=0)
        routers = {(b.experts.n_experts, b.experts.top_k) for b in self.blocks if b.experts}
        if (self.load_balancing_weight or self.router_z_weight) and len(routers) != 1:
            raise ValueError(
                "LanguageModel: load_balancing_weight and router_z_weight need layers with "
                f"experts, all with one n_experts and one top_k, "
                f"got {sorted(routers) or 'no experts'}"
            )
        if self.load_balancing_weight and any(
            b.experts.score != "softmax" for b in self.blocks if b.experts
        ):
            raise ValueError(
                'LanguageModel: load_balancing_weight needs experts with score "softmax"'
            )

    def _require_recurrent(self) -> None:
        """ValueError for recurrent layers in an encoder, or with positions that all layers add."""
        if not any(map(is_recurrent, self.blocks)):
            return
        if not self.causal:
            raise ValueError("LanguageModel: a gated DeltaNet needs causal = True")
        for name in ("alibi", "relative_bias"):
            if getattr(self, name):
                raise ValueError(f"LanguageModel: a gated DeltaNet excludes {name}")

    def _require_xl(self) -> None:
        """ValueError unless layers with attn.xl are all of them, and have no other positions."""
        layers_with_xl = [config.attn.xl for config in self.blocks]
        if self.memory_len is not None:
            require_sizes("LanguageModel", 0, memory_len=self.memory_len)
            if not any(layers_with_xl):
                raise ValueError("LanguageModel: memory_len needs attn.xl in all blocks")
            if self.blocks[0].reversible:
                raise ValueError("LanguageModel: memory_len excludes reversible blocks")
        if not any(layers_with_xl):
            return
        if not all(layers_with_xl):
            raise ValueError("LanguageModel: attn.xl must be that of all blocks, or of none")
        if not self.causal:
            raise ValueError("LanguageModel: attn.xl needs causal attention")
        in_embed = self.embed is not None and self.embed.positions != "none"
        others = {
            "positions in the embedding": in_embed,
            "rotary": bool(distinct(self.rotary)),
            "alibi": self.alibi,
            "relative_bias": self.relative_bias is not None,
        }
        if present := [name for name, is_there in others.items() if is_there]:
            raise ValueError(f"LanguageModel: attn.xl excludes {', '.join(present)}")

    @property
    def d_model(self) -> int:
        """D, the width of the hidden states."""
        return self.blocks[0].d_model

    def init(
        self, seed: int = 0, backend: str | Backend = "numpy", dtype: str = "float32"
    ) -> LanguageModelParams:
        """Initial parameters: weights normal with variance 1 / d_model, biases 0, norms 1.

        The last weights of each residual branch are scaled by (2 n_layers)^-1/2, as in GPT-2,
        unless the block has a residual_scale.
        """
        return self.init_from(registry.get(backend).generator(seed, dtype))

    def init_from(self, rng: Generator) -> LanguageModelParams:
        """Initial parameters as from `init`, with random numbers, backend and dtype of `rng`."""
        n_layers, width = len(self.blocks), self.d_model
        draw = partial(normal, std=width**-0.5)
        embedding = None if self.embed is None else self.embed.init(rng, draw=draw)
        run = 1 if self.n_shared_layer_groups is None else n_layers // self.n_shared_layer_groups
        first_blocks = self.blocks[::run]  # the first block of each group
        blocks = StackParams.init(
            rng,
            first_blocks,
            final_norm=self.final_norm,
            relative_bias=self.relative_bias,
            draw=draw,
            out_scale=1 / math.sqrt(2 * n_layers),
        )
        head: Any = None
        if self.head is not None:
            head = self.head.init(rng, width, self.embed, draw=draw)
        return LanguageModelParams(embedding, blocks, head)

    def forward(
        self,
        params: LanguageModelParams,
        tokens: Array,
        *,
        mask: Array | None = None,
        positions: Array | None = None,
        types: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, LanguageModelCache]:
        """Logits (B, T, V), or hidden states (B, T, D) without a head that gives logits.

        A Classifier gives (B, n_labels), a TokenClassifier (B, T, n_labels), a
        Discriminator (B, T).

        tokens: (B, T) integers in [0, V); vectors (B, T, D) if embed is None
        mask: (B, T), True = a token, False = padding on either side, which never changes the
            results of tokens; None: no padding
        positions: (B, T) or (T,) position ids; None: 0, 1, ... without counting padding
        types: (B, T) token types (BERT); None: type 0
        dropout_key: None: no dropout
        ValueError or TypeError for other arguments.
        """
        x, hidden = self.hidden(
            params,
            tokens,
            mask=mask,
            positions=positions,
            types=types,
            dropout_key=dropout_key,
        )
        return self._logits(params, x, hidden, mask, dropout_key)

    def _logits(
        self,
        params: LanguageModelParams,
        x: Array,
        hidden: HiddenCache,
        mask: Array | None,
        dropout_key: ops.RandomKey | None,
    ) -> tuple[Array, LanguageModelCache]:
        """The head of the hidden states x, and the cache of both."""
        around = self._around_head(params, mask, dropout_key)
        y, head_cache = logits_of("LanguageModel", self.head, x, params.head, **around)
        return y, saved(LanguageModelCache(hidden, head_cache))

    def _around_head(
        self, params: LanguageModelParams, mask: Array | None, dropout_key: ops.RandomKey | None
    ) -> dict[str, Any]:
        """The keyword arguments of `head.forward` and `head.loss`: table, mask and dropout_key.

        table: the embedding's (V, D), which a tied head uses; None without an embedding
        mask: (B, T), unchanged
        dropout_key: a key of the head alone; None: no dropout
        """
        key = dropout_key and dropout_key.at(SITES * len(self.blocks) + 2)
        table = None if params.embed is None else params.embed.table
        return {"table": table, "mask": mask, "dropout_key": key}

    def hidden(
        self,
        params: LanguageModelParams,
        tokens: Array,
        *,
        mask: Array | None = None,
        positions: Array | None = None,
        types: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        memory: SegmentMemory | None = None,
    ) -> tuple[Array, HiddenCache]:
        """The hidden states (B, T, D), without the head. For the arguments see `forward`.

        memory: of the segments before; then `cache.stack.layers.extended` is for the next one
        """
        self._require_stack(params)
        require_array("LanguageModel", "tokens", tokens)
        streams = dropout_streams(dropout_key, len(self.blocks))
        are_given = positions is not None
        if are_given:
            self._require_positional()
        keys = key_mask("LanguageModel", "mask", mask, tokens)
        if mask is not None and positions is None:
            positions = position_ids(mask)
        (x, pos), embed_cache = self._embedded(
            params, tokens, positions, types=types, key=streams[0]
        )
        length = tokens.shape[1]  # x may be a part of the sequence
        context = Context(
            keys,
            self.causal,
            rotary=self._rotary(x, length, positions, math.inf if are_given else length),
            segment_memory=None if memory is None else memory.written,
            dropout_key=streams[1],
        )
        y, stack_cache = stack(
            x,
            params.stack,
            SideInputs(bias=self._alibi(x, length, length), pos=pos),
            configs=self.blocks,
            context=context,
            relative_bias=self.relative_bias,
            dropout_rate=self.out_dropout,
            activation_checkpointing=self.activation_checkpointing,
        )
        return y, HiddenCache(embed_cache, stack_cache)

    def _require_stack(self, params: LanguageModelParams) -> None:
        """ValueError unless params.stack fits the configuration. TypeError for another type."""
        require_params("LanguageModel", params, LanguageModelParams)
        n_groups = self.n_shared_layer_groups
        n_blocks = len(self.blocks) if n_groups is None else n_groups
        require_stack(
            "LanguageModel", "params.stack", params.stack, self.blocks, self.final_norm, n_blocks
        )

    def _embedded(
        self,
        params: LanguageModelParams,
        tokens: Array,
        positions: Array | None,
        *,
        types: Array | None = None,
        start: int | Array = 0,
        key: ops.RandomKey | None = None,
    ) -> tuple[tuple[Array, Array | None], Any]:
        """The embedded tokens, and their positions if the heads need them; vectors unchanged."""
        if types is not None and self.embed is None:
            raise ValueError("LanguageModel: types need an embedding, and there is none")
        if self.embed is not None and self.embed.positions == "none":
            positions = None
        how: Any = {"positions": positions, "types": types, "start": start, "dropout_key": key}
        return embedded("LanguageModel", "tokens", tokens, params.embed, self.embed, **how)

    def with_layers(self, ids: Sequence[int], **changes: Any) -> LanguageModel:
        """A copy with the layers `ids`, which may repeat, and with other changes of its fields."""
        rotary = self.rotary
        if isinstance(rotary, tuple):
            rotary = tuple(rotary[i] for i in ids)
        blocks = tuple(self.blocks[i] for i in ids)
        return replace(self, blocks=blocks, rotary=rotary, **changes)

    @property
    def context(self) -> int | None:
        """The most tokens of a sequence; None if only memory limits it."""
        return None if self.embed is None else self.embed.context

    @property
    def id_sizes(self) -> tuple[int | None, ...]:
        """The number of ids of tokens and of targets in `loss`; None if it takes no ids there."""
        size = None if self.embed is None else self.embed.vocab_size
        return size, getattr(self.head, "n_labels", size)

    def init_state(self) -> DecodeState:
        """The empty state, for `decode`."""
        changes = max_unscaled_len(self.rotary) < math.inf
        caches = (empty_cache(config) for config in self.blocks)
        return DecodeState(tuple(caches), rope_length=0 if changes else None)

    @inference()
    def decode(
        self,
        params: LanguageModelParams,
        tokens: Array,
        state: DecodeState,
        *,
        mask: Array | None = None,
        all_logits: bool = False,
        length: int | None = None,
    ) -> tuple[Array, DecodeState]:
        """Logits (B, V) after the last of `tokens`, and the state that includes them.

        Keys and values of earlier tokens come from the state's KV cache. If the new tokens change
        the RoPE frequencies ("dynamic", "longrope"), the whole text is read again, and the logits
        equal those of `forward`. There is no backward.

        tokens: (B, T) integers in [0, V), the next tokens of each sequence
        state: of the tokens before; it stays unchanged, but if it is static
            (`DecodeState.preallocate`), its arrays may be overwritten, and it must have T free
            slots, which is not checked
        mask: (B, T), True = a token, False = padding, which must be on the left of a text
        all_logits: return the logits after each token, (B, T, V)
        length: tokens that the longest text will have after further calls; it decides the RoPE
            frequencies

        ValueError if the model is not causal, if the tokens do not fit the context, if a static
        state has more slots than tokens with the same RoPE frequencies, and, in the first call, if
        params do not fit the configuration.
        """
        if not self.causal or not isinstance(self.head, LMHead) or self.embed is None:
            raise ValueError("decode: the model must be causal and have an embedding and an LMHead")
        require_tokens("decode", "tokens", tokens)
        if state.is_empty:  # the first call
            self._require_stack(params)
        n_keys = state.capacity if state.is_static else state.length + tokens.shape[1]
        if self.context is not None and n_keys > self.context:
            raise ValueError(
                f"decode: at most {self.context} tokens fit the model's context, got {n_keys}"
            )
        if state.is_static and n_keys > (most := max_unscaled_len(self.rotary)):
            raise ValueError(
                f"decode: a static state must have at most {most} slots, "
                f"since RoPE frequencies change with the length, got {n_keys}"
            )
        if state.rope_length is not None:
            if state.ids is not None:
                require_rows(tokens, state.ids.shape[0])
            length = max(length or 0, decoding.longest(self, tokens, mask, state))
            state = decoding.rotated_for(self, length, params, state)
        return decoding.decode(self, params, tokens, state, mask, all_logits=all_logits)

    def truncate(self, state: DecodeState, n: int) -> DecodeState:
        """`state` without its last `n` tokens.

        A static state is not checked: the n tokens must have been decoded after `preallocate`.

        ValueError, for other states, if there are fewer than n tokens, or if a layer's window has
        dropped keys that attention needs again. No such key is missing if n is at most the number
        of tokens of the last `decode`. ValueError also for n above 0 if a layer is recurrent.
        """
        if state.is_static:
            caches: Any = state.kv_cache
            for recurrent in (cache for cache in caches if isinstance(cache, RecurrentState)):
                recurrent.truncated(n, needs=0)
            return state._replace(length=state.truncated_length(n))
        windows: list[Window | None] = [config.attn.window for config in self.blocks]
        if self.memory_len is not None:
            windows = [(self.memory_len, None)] * len(self.blocks)
        kv_cache = truncated(state.kv_cache, windows, length=state.length, n=n)
        length = state.length - n
        mask = None if state.mask is None else state.mask[:, :length]
        ids = None if state.ids is None else state.ids[:, :length]
        return state._replace(kv_cache=kv_cache, mask=mask, length=length, ids=ids)

    def _require_positional(self) -> None:
        """ValueError if the model would ignore position ids."""
        if not distinct(self.rotary) and (self.embed is None or self.embed.positions == "none"):
            raise ValueError(
                "LanguageModel: positions need positions in the embedding or rotary ones; this "
                "model has neither, and uses the order of tokens"
            )

    def _rotary(
        self, x: Array, length: int, positions: Array | None, at_most: float
    ) -> LayerTables:
        """The RoPE tables for `length` tokens. at_most: a bound of the positions; inf: unknown."""
        if positions is not None and at_most > max_unscaled_len(self.rotary):
            # The largest position (of the longest text without padding) determines the frequencies.
            length = int(array_namespace(positions).max(positions)) + 1
        return tables_of(self.rotary, like=x, length=length, positions=positions)

    def _alibi(
        self, x: Array, n_queries: int, n_keys: int, at: Array | None = None
    ) -> Array | None:
        if not self.alibi:
            return None
        sizes = {"n_queries": n_queries, "n_keys": n_keys}
        return layers.alibi(self.blocks[0].attn.n_heads, **sizes, like=x, at=at)

    def loss(
        self,
        params: LanguageModelParams,
        tokens: Array,
        targets: Array,
        *,
        mask: Array | None = None,
        positions: Array | None = None,
        types: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, LossCache[LanguageModelParams] | BalancedLossCache]:
        """The mean cross-entropy in nats, plus the weighted losses of routers.

        targets: (B,) for a Classifier, (B, T) for other heads
        options: of `ops.cross_entropy`
        For the other arguments and errors see `forward`.
        """
        self._require_loss()
        inputs: Any = {"mask": mask, "positions": positions, "types": types}
        x, hidden = self.hidden(params, tokens, dropout_key=dropout_key, **inputs)
        return self._loss(params, x, hidden, targets, mask, dropout_key, options)

    def _require_loss(self) -> None:
        if self.head is None or not hasattr(self.head, "loss"):
            got = type(self.head).__name__
            raise ValueError(f"LanguageModel: a loss needs a head that gives logits, got {got}")

    def _loss(
        self,
        params: LanguageModelParams,
        x: Array,
        hidden: HiddenCache,
        targets: Array,
        mask: Array | None,
        dropout_key: ops.RandomKey | None,
        options: dict[str, Any],
    ) -> tuple[Array, LossCache[LanguageModelParams] | BalancedLossCache]:
        """The loss of the hidden states x, and the cache of both."""
        head: Any = self.head
        around = self._around_head(params, mask, dropout_key)
        loss, top = head.loss(x, params.head, targets=targets, **around, **options)
        cache: LossCache[LanguageModelParams]
        cache = LossCache(saved(LanguageModelCache(hidden, top)), loss)
        if not (self.load_balancing_weight or self.router_z_weight):
            return loss, cache
        weights = self.load_balancing_weight, self.router_z_weight
        more, routers = router_loss(self.blocks, hidden.stack, mask, weights)
        return loss + more, BalancedLossCache(cache, routers)

    def init_memory(self, params: LanguageModelParams, batch_size: int) -> SegmentMemory:
        """The empty memory of `batch_size` texts, for `segment` and `segment_loss`.

        ValueError if memory_len is None.
        """
        if self.memory_len is None:
            raise ValueError("init_memory: the model must have a memory_len, got None")
        (batch_size,) = require_sizes("init_memory", 0, batch_size=batch_size)
        like = tree.value(next(iter(tree.flatten(params.stack).values())))
        shape = (batch_size, self.memory_len, self.d_model)
        zeros = array_namespace(like).zeros(shape, dtype=like.dtype, device=device(like))
        return SegmentMemory((zeros,) * len(self.blocks), 0)

    def segment(
        self,
        params: LanguageModelParams,
        tokens: Array,
        memory: SegmentMemory,
        *,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, LanguageModelCache, SegmentMemory]:
        """Logits of the next segment of each text, their cache, and the memory after it.

        Queries attend to the memory and to the segment up to themselves (arXiv:1901.02860, section
        3.2). The memory gets no gradient. If memory_len is at least the length of the text, the
        logits of all segments are those of `forward` for the whole text.

        tokens: (B, T) integers in [0, V); T may differ between calls
        memory: of `init_memory`, or of the segment before
        dropout_key: None: no dropout
        ValueError or TypeError for other arguments.
        """
        x, hidden, memory = self._segment(params, tokens, memory, dropout_key)
        logits, cache = self._logits(params, x, hidden, None, dropout_key)
        return logits, cache, memory

    def segment_loss(
        self,
        params: LanguageModelParams,
        tokens: Array,
        targets: Array,
        memory: SegmentMemory,
        *,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, LossCache[LanguageModelParams] | BalancedLossCache, SegmentMemory]:
        """The loss of the next segment of each text, its cache, and the memory after it.

        targets: (B, T) integers in [0, V)
        options: of `ops.cross_entropy`
        For the other arguments and errors see `segment`, for the loss see `loss`.
        """
        self._require_loss()
        x, hidden, memory = self._segment(params, tokens, memory, dropout_key)
        loss, cache = self._loss(params, x, hidden, targets, None, dropout_key, options)
        return loss, cache, memory

    def _segment(
        self,
        params: LanguageModelParams,
        tokens: Array,
        memory: SegmentMemory,
        dropout_key: ops.RandomKey | None,
    ) -> tuple[Array, HiddenCache, SegmentMemory]:
        """The hidden states of a segment, their cache, and the memory after it."""
        if self.memory_len is None:
            raise ValueError("segment: the model must have a memory_len, got None")
        if len(memory.inputs) != len(self.blocks):
            raise ValueError(
                f"segment: memory must be of {len(self.blocks)} layers, got {len(memory.inputs)}"
            )
        if (capacity := memory.inputs[0].shape[1]) != self.memory_len:
            raise ValueError(
                f"segment: memory must have memory_len = {self.memory_len} positions, "
                f"got {capacity}; init_memory returns an empty one"
            )
        x, hidden = self.hidden(params, tokens, dropout_key=dropout_key, memory=memory)
        return x, hidden, memory.advanced(hidden.stack.layers.extended)

    def pooled(
        self,
        params: LanguageModelParams,
        tokens: Array,
        *,
        mask: Array | None = None,
        pooling: str | tuple[str, ...] = "mean",
        skip: int = 0,
        normalize: bool = False,
        types: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, PooledCache]:
        """One vector for each sequence, (B, D) or (B, n D), pooled from its hidden states.

        tokens: (B, T) integers in [0, V)
        mask: (B, T), True = a token, False = padding; None: no padding
        pooling: of `layers.pool`: "mean", "first", "last", "max", ..., or a tuple of n of them;
            "pooler": BERT's pooler, of a model with that head
        skip: leave out the first `skip` tokens of each sequence, except for "pooler"
        normalize: scale the vectors to length 1
        types: (B, T) token types (BERT); None: type 0
        dropout_key: None: no dropout
        ValueError for another pooling.
        """
        from xformer.models.pooled import PooledCache, pool_hidden, require_pooling

        require_pooling(pooling, self.head)
        x, hidden = self.hidden(params, tokens, mask=mask, types=types, dropout_key=dropout_key)
        y, caches = pool_hidden(
            x, self.head, params.head, pooling=pooling, normalize=normalize, mask=mask, skip=skip
        )
        return y, saved(PooledCache(hidden, *caches, params.head))


@short
class LanguageModelParams(NamedTuple):
    """Parameters of a LanguageModel."""

    embed: EmbedParams | None
    stack: StackParams
    head: Any  # the head's parameters; None: no head, or one that is tied to embed.table


def embedded(
    op: str,
    name: str,
    x: Array,
    params: EmbedParams | None,
    config: EmbedConfig | None,
    **options: Any,
) -> tuple[tuple[Array, Array | None], Any]:
    """The embedded sequence, and its positions if the heads need them; vectors unchanged.

    name: of the sequence, for messages
    options: of `layers.embed`, for ids
    """
    field = "params.embed" if name == "tokens" else f"params.{name}_embed"
    require_present(op, field, params, config is not None)
    if params is None or config is None:
        require_vectors(op, name, x)
        return (x, None), None
    require_tokens(op, name, x)
    return embed(params, ids=x, config=config, **options)


@short
class HiddenCache(NamedTuple):
    """Saved by `LanguageModel.hidden` for backward: the caches of the embedding and the stack."""

    embed: Any  # of `layers.embed`; None: the input is vectors, not token ids
    stack: Any  # of `layers.stack`

    def backward(
        self, dx: Array, drouter_logits: tuple[Any, ...] | None = None
    ) -> LanguageModelParams:
        """Gradients of params, without the head."""
        return self.backward_all(dx, drouter_logits)[0]

    def backward_all(
        self,
        dx: Array,
        drouter_logits: tuple[Any, ...] | None = None,
        *,
        ready: Ready | None = None,
    ) -> tuple[LanguageModelParams, Array | None]:
        """Gradients of params, without the head, and of the input; None if the input is ids.

        ready: called with the name and the gradients of each part of the stack
            ("stack.blocks.0", "stack.norm", ...), as soon as they are complete
        """
        dx, dstack, dside = self.stack.backward(dx, drouter_logits, ready=below(ready, "stack"))
        dembed = None if self.embed is None else self.embed.backward(dx, dside.pos)
        grads = LanguageModelParams(dembed, dstack, None)
        return grads, dx if self.embed is None else None


@short
class LanguageModelCache(NamedTuple):
    """Saved by `LanguageModel.forward` and `loss` for backward: two caches.

    For a loss, dy is dloss.
    """

    hidden: HiddenCache
    head: Any  # of the head, or of its loss; None: no head

    def backward(
        self,
        dy: Array,
        drouter_logits: tuple[Any, ...] | None = None,
        *,
        ready: Ready | None = None,
    ) -> LanguageModelParams:
        """Gradients of params. The gradients of both uses of a tied table are added.

        dy: the gradient of the logits (B, T, V), or of the hidden states (B, T, D) without a head;
            for a loss, the gradient () of the loss
        drouter_logits: for each layer, the gradient of an auxiliary loss on its router, or None.
        ready: called with the name and the gradients of each part of params ("head",
            "stack.blocks.0", "embed", ...), as soon as they are complete
        """
        return self.backward_all(dy, drouter_logits, ready=ready)[0]

    def backward_all(
        self,
        dy: Array,
        drouter_logits: tuple[Any, ...] | None = None,
        *,
        ready: Ready | None = None,
    ) -> tuple[LanguageModelParams, Array | None]:
        """Gradients of params, and of the input; None if the input is ids.

        dy, drouter_logits, ready: see `backward`
        """
        dhead = dtable = None
        if self.head is not None:
            dy, dhead, dtable = self.head.backward(dy)
            report(ready, "head", dhead)
        grads, dtokens = self.hidden.backward_all(dy, drouter_logits, ready=ready)
        dembed = grads.embed
        if dtable is not None and dembed is not None:
            dembed = dembed._replace(table=dembed.table + dtable)
        report(ready, "embed", dembed)
        return grads._replace(embed=dembed, head=dhead), dtokens


@short
class BalancedLossCache(NamedTuple):
    """Saved by `LanguageModel.loss` for backward, if the routers have auxiliary losses.

    The caches of the cross-entropy and of the auxiliary losses.
    """

    tokens: LossCache[LanguageModelParams]
    routers: RouterLossCache

    def backward(
        self, dloss: Array | None = None, *, ready: Ready | None = None
    ) -> LanguageModelParams:
        """Gradients of params.

        dloss: (), the gradient of the loss; None: 1
        ready: called with the name and the gradients of each part of params ("head",
            "stack.blocks.0", "embed", ...), as soon as they are complete
        """
        dloss = one(self.tokens.value) if dloss is None else dloss
        grads: LanguageModelParams = self.tokens.model.backward(
            dloss, self.routers.backward(dloss), ready=ready
        )
        return grads
