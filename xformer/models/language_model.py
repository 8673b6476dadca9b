"""A language model of one stack: a decoder such as GPT or Llama, an encoder such as BERT."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from xformer import backends, layers, models, ops, renamed
from xformer.backends import Generator
from xformer.checks import as_indices, number, plain_numbers, require_tokens
from xformer.dispatch import inference, saved
from xformer.initializers import normal
from xformer.layers.advance import advance
from xformer.layers.block import SITES, BlockConfig
from xformer.layers.embed import EmbedConfig, EmbedParams, embed
from xformer.layers.kv_cache import KVCache, require_rows, truncated
from xformer.layers.stack import (
    StackParams,
    dropout_streams,
    require_configs,
    require_stack,
    stack,
)
from xformer.models.lm_head import LMHead, require_present, zeros_of
from xformer.models.loss import LossCache
from xformer.models.state import DecodeState, appended_mask, position_ids, require_padding_mask
from xformer.ops._loss import one
from xformer.shapes import require_array
from xformer.showing import short
from xformer.typing import Array


@renamed.arguments(
    n_groups="n_shared_layer_groups",
    balance="load_balancing_weight",
    router_z="router_z_weight",
    checkpoint="activation_checkpointing",
    source="hf_config",
)
@dataclass(frozen=True)
class LanguageModel:
    """Tokens to logits, or to hidden states where head is None. ValueError where parts do not fit.

    In the place of tokens stand vectors (B, T, D) where embed is None.
    Parameters are data, made by `init`, or loaded by `xformer.pretrained.load`. Positions come in
    by the embedding, by rotary, alibi or relative.

    A mixture of experts adds to the loss `load_balancing_weight` times `ops.load_balancing` and
    `router_z_weight` times `ops.router_z_loss`, of the routers of all its layers together.
    """

    embed: EmbedConfig | None
    blocks: tuple[BlockConfig, ...]  # one for each layer
    causal: bool = True
    rotary: layers.RopeConfig | None = None
    alibi: bool = False
    relative: layers.RelativeConfig | None = None
    final_norm: bool | None = None  # unless the blocks are post-LN, if not given
    n_shared_layer_groups: int | None = (
        None  # of layers with shared parameters (ALBERT); None: none are shared
    )
    head: models.Head | None = LMHead()  # noqa: RUF009 - frozen
    out_dropout: float = 0.0  # of the hidden states
    load_balancing_weight: float = 0.0
    router_z_weight: float = 0.0
    activation_checkpointing: bool = (
        False  # each block runs again in its backward, and keeps its input alone
    )
    # its config.json, and its generation_config.json, if any
    hf_config: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    generation_config: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_configs("LanguageModel", self.blocks)
        width = self.d_model
        if self.embed is not None and self.embed.d_model != width:
            raise ValueError(
                f"LanguageModel: embed.d_model must be that of the blocks, {width}, "
                f"got {self.embed.d_model}"
            )
        if getattr(self.head, "of_tokens", False) and self.embed is None:
            raise ValueError("LanguageModel: a head over a vocabulary needs embed, got None")
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
                f"LanguageModel: n_groups must divide {len(self.blocks)} layers, "
                f"got {self.n_shared_layer_groups}"
            )
        if self.alibi and not self.causal:
            raise ValueError("LanguageModel: alibi goes with causal: it favours keys ahead")
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

    start = renamed.method("start", "init_state")
    extend = renamed.method("extend", "decode", every="all_logits")
    rewind = renamed.method("rewind", "truncate")

    @property
    def d_model(self) -> int:
        """D, the width of the hidden states."""
        return self.blocks[0].d_model

    def init(
        self, seed: int = 0, backend: str = "numpy", dtype: str = "float32"
    ) -> LanguageModelParams:
        """Initial parameters: normal of variance 1 / d_model, biases 0, norms 1.

        The weights that end a residual branch are scaled by (2 n_layers)^-1/2, as GPT-2's.
        """
        return self.init_from(backends.get(backend).generator(seed, dtype))

    def init_from(self, rng: Generator) -> LanguageModelParams:
        """Initial parameters, drawn from `rng`."""
        n_layers, width = len(self.blocks), self.d_model
        draw = partial(normal, std=width**-0.5)
        embedding = None if self.embed is None else self.embed.init(rng, draw=draw)
        run = 1 if self.n_shared_layer_groups is None else n_layers // self.n_shared_layer_groups
        own = self.blocks[::run]  # the first of each group
        blocks = StackParams.init(
            rng,
            own,
            final_norm=self.final_norm,
            relative=self.relative,
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
        """Logits (B, T, V), or (B, n_labels) of a Classifier, or hidden states (B, T, D).

        tokens: (B, T) integers in [0, V). mask: (B, T), True = a token, not padding; padding may
        stand on either side and never changes what comes out for the tokens. positions: (B, T) or
        (T,) integers; unless given 0, 1, ... counted over the tokens that mask keeps. types:
        (B, T), of tokens (BERT). dropout_key None: no dropout. ValueError, TypeError where they
        are not such.
        """
        x, hidden = self.hidden(
            params,
            tokens,
            mask=mask,
            positions=positions,
            types=types,
            dropout_key=dropout_key,
        )
        head_cache: Any = None
        if self.head is None:
            require_present("LanguageModel", "params.head", params.head, False)
        else:
            around = self._around_head(params, mask, dropout_key)
            x, head_cache = self.head.forward(x, params.head, **around)
        return x, saved(LanguageModelCache(hidden, head_cache))

    def _around_head(
        self, params: LanguageModelParams, mask: Array | None, dropout_key: ops.RandomKey | None
    ) -> dict[str, Any]:
        """What a head gets beside hidden states and its parameters."""
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
    ) -> tuple[Array, HiddenCache]:
        """Hidden states (B, T, D), below the head; arguments as in `forward`."""
        require_array("LanguageModel", "tokens", tokens)
        n_blocks = (
            len(self.blocks) if self.n_shared_layer_groups is None else self.n_shared_layer_groups
        )
        require_stack("LanguageModel", params.stack, self.blocks, self.final_norm, n_blocks)
        keys = dropout_streams(dropout_key, len(self.blocks))
        given = positions is not None
        if given:
            self._require_places()
        if mask is not None:
            require_padding_mask(mask, tokens)
            positions = position_ids(mask) if positions is None else positions
        (x, pos), embed_cache = self._embedded(params, tokens, positions, types=types, key=keys[0])
        length = x.shape[1]
        y, stack_cache = stack(
            x,
            params.stack,
            None,
            self._alibi(x, length),
            pos,
            configs=self.blocks,
            relative=self.relative,
            rotary=self._rotary(x, length, positions, math.inf if given else length),
            mask=None if mask is None else mask[:, None, None, :],
            causal=self.causal,
            dropout_rate=self.out_dropout,
            dropout_key=keys[1],
            activation_checkpointing=self.activation_checkpointing,
        )
        return y, HiddenCache(embed_cache, stack_cache)

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
        """The embedding of tokens; vectors are their own."""
        require_present("LanguageModel", "params.embed", params.embed, self.embed is not None)
        if self.embed is None or params.embed is None:
            if types is not None:
                raise ValueError("LanguageModel: types go with an embedding, and there is none")
            return (tokens, None), None
        require_tokens("LanguageModel", "tokens", tokens)
        in_embed = self.embed.positions != "none"
        return embed(
            params.embed,
            ids=tokens,
            config=self.embed,
            positions=positions if in_embed else None,
            types=types,
            start=start,
            dropout_key=key,
        )

    @property
    def context(self) -> int | None:
        """The tokens that fit; None where nothing but memory sets a limit."""
        if self.embed is None or self.embed.max_len is None:
            return None
        return self.embed.max_len - self.embed.offset

    @property
    def id_sizes(self) -> tuple[int | None, ...]:
        """Of tokens and targets of `loss` how many ids there are; None where it takes no ids."""
        size = None if self.embed is None else self.embed.vocab_size
        return size, getattr(self.head, "n_labels", size)

    def init_state(self) -> DecodeState:
        """No text yet, for `decode`."""
        changes = self.rotary is not None and self.rotary.max_unscaled_len < math.inf
        return DecodeState((KVCache(),) * len(self.blocks), rope_length=0 if changes else None)

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
        """Logits after the last token, (B, V), and the state with `tokens` (B, T) in it.

        Continues the text of `state`, which itself stays what it was. Its keys and values are not
        computed again, unless the new tokens change the RoPE frequencies ("dynamic", "longrope"):
        then the whole text is read again, and the logits are those of `forward` on all of it.
        mask: as in `forward`, of these tokens; padding must stand on the left of a text. every:
        logits after each token, (B, T, V). length: tokens that the longest text of the batch will
        have after further calls; RoPE frequencies go by it. There is no backward. Where the state's
        columns are fixed (`DecodeState.preallocate`) its arrays may be written over, and the caller
        must make sure that columns are left. ValueError for a model that is not causal, where the
        tokens do not fit the context, and for more fixed columns than RoPE frequencies stay the
        same for.
        """
        if not self.causal or not isinstance(self.head, LMHead):
            raise ValueError("decode: the model must be causal and have an LMHead")
        require_tokens("decode", "tokens", tokens)
        n_keys = state.capacity if state.is_static else state.length + tokens.shape[1]
        if self.context is not None and n_keys > self.context:
            raise ValueError(
                f"decode: at most {self.context} tokens fit the model's context, got {n_keys}"
            )
        if state.is_static and self.rotary is not None and n_keys > self.rotary.max_unscaled_len:
            raise ValueError(
                f"decode: at most {self.rotary.max_unscaled_len} slots go with RoPE frequencies "
                f"that change with the length, got {n_keys}"
            )
        if state.rope_length is not None:
            if state.ids is not None:
                require_rows(tokens, state.ids.shape[0])
            length = max(length or 0, self._longest(tokens, mask, state))
            state = self._rotated_for(length, params, state)
        return self._decode(params, tokens, state, mask, all_logits=all_logits)

    def _decode(
        self,
        params: LanguageModelParams,
        tokens: Array,
        state: DecodeState,
        mask: Array | None,
        *,
        all_logits: bool,
    ) -> tuple[Array, DecodeState]:
        """As `decode`, of tokens that fit the context, with the RoPE frequencies of the state."""
        if state.kv_cache[0].k is not None:
            require_rows(tokens, state.kv_cache[0].k.shape[0])
        n_keys = state.capacity if state.is_static else state.length + tokens.shape[1]
        kept, seen, positions = self._kept(tokens, state, mask)
        places = None if state.mask is None and mask is None else positions
        (x, pos), _ = self._embedded(params, tokens, places, start=state.length)
        rotary = None
        if self.rotary is not None:
            length = state.rope_length or 0
            rotary = layers.rope_tables(self.rotary, like=x, length=length, positions=positions)
        x, kv_cache = advance(
            x,
            params.stack,
            None,
            self._alibi(x, n_keys, state.write_index),
            pos,
            configs=self.blocks,
            kv_cache=state.static_kv_cache() if state.is_static else state.kv_cache,
            n_cached=state.length,
            relative=self.relative,
            rotary=rotary,
            mask=seen,
        )
        x = x if all_logits else x[:, -1:, :]
        logits, _ = self.head.forward(x, params.head, params.embed.table)  # type: ignore[union-attr]
        return logits if all_logits else logits[:, 0, :], state.appended(kv_cache, kept, tokens)

    def truncate(self, state: DecodeState, n: int) -> DecodeState:
        """`state` without its last `n` tokens, for which another text may follow.

        ValueError for more tokens than there are. Where layers have windows also for more than the
        last `decode` added, if the windows have dropped what is needed again. Where columns are
        fixed, the caller must make sure that these tokens were added after that.
        """
        if state.is_static:
            return state._replace(length=state.truncated_length(n))
        windows = [config.window for config in self.blocks]
        kv_cache = truncated(state.kv_cache, windows, length=state.length, n=n)
        length = state.length - n
        mask = None if state.mask is None else state.mask[:, :length]
        ids = None if state.ids is None else state.ids[:, :length]
        return state._replace(kv_cache=kv_cache, mask=mask, length=length, ids=ids)

    def _longest(self, tokens: Array, mask: Array | None, state: DecodeState) -> int:
        """Tokens of the longest text with `tokens`, or a bound below which it makes no difference.

        Padding is left out, as in `_rotary`.
        """
        length: int = state.length + tokens.shape[1]
        kept = appended_mask(state.mask, mask, tokens, state.length)
        if kept is None or self.rotary is None or length <= self.rotary.max_unscaled_len:
            return length
        return int(array_namespace(kept).max(position_ids(kept))) + 1

    def _rotated_for(
        self, length: int, params: LanguageModelParams, state: DecodeState
    ) -> DecodeState:
        """`state` with the RoPE frequencies of `length`; they changed: its text is read again.

        Rotating the keys alone would not do: behind the first layer they come from hidden states
        which were computed with the frequencies of then.
        """
        rope_length = self.rotary.frequency_length(length)  # type: ignore[union-attr]
        if rope_length == state.rope_length:
            return state
        empty = self.init_state()._replace(rope_length=rope_length)
        if state.length == 0:
            return empty
        return self._decode(params, state.ids, empty, state.mask, all_logits=False)[1]

    def _kept(
        self, tokens: Array, state: DecodeState, mask: Array | None
    ) -> tuple[Array | None, Array | None, Array]:
        """The mask of the state, what tokens see of it, and their places, as `_places`.

        None of both where all columns are tokens, of which each sees those before it.
        """
        if not state.is_static:
            kept = appended_mask(state.mask, mask, tokens, state.length)
            seen = None if kept is None else kept[:, None, None, :]
            return kept, seen, self._places(tokens, kept, state.length)
        if mask is not None:
            raise ValueError("decode: a static state has its own mask, got another")
        n = tokens.shape[1]
        return state.mask, state.key_mask(n)[:, None, :, :], state.position_ids(n)

    def _places(self, tokens: Array, kept: Array | None, n_cached: int) -> Array:
        """The place of each of the last tokens in its text."""
        if kept is not None:
            return position_ids(kept)[:, n_cached:]
        xp = array_namespace(tokens)
        dtype = as_indices(tokens).dtype
        return xp.arange(n_cached, n_cached + tokens.shape[1], dtype=dtype, device=device(tokens))

    def _require_places(self) -> None:
        """ValueError where positions that are given would be ignored."""
        if self.rotary is None and (self.embed is None or self.embed.positions == "none"):
            raise ValueError(
                "LanguageModel: positions go with an embedding's or rotary ones; a model without "
                "either goes by the order of tokens"
            )

    def _rotary(
        self, x: Array, length: int, positions: Array | None, at_most: float
    ) -> layers.RopeTables | None:
        """The tables for a text of `length`; positions lie below at_most, so far as is known."""
        if self.rotary is None:
            return None
        if positions is not None and at_most > self.rotary.max_unscaled_len:
            # The frequencies go by the largest position: of the longest text, without its padding.
            length = int(array_namespace(positions).max(positions)) + 1
        return layers.rope_tables(self.rotary, like=x, length=length, positions=positions)

    def _alibi(self, x: Array, n_keys: int, at: Array | None = None) -> Array | None:
        if not self.alibi:
            return None
        sizes = {"n_queries": x.shape[1], "n_keys": n_keys}
        return layers.alibi(self.blocks[0].n_heads, **sizes, like=x, at=at)

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
        """Mean cross-entropy in nats of targets: (B, T) of an LM head, (B,) of a Classifier.

        options: those of `ops.cross_entropy`; the rest as in `forward`.
        """
        if self.head is None or not hasattr(self.head, "loss"):
            got = type(self.head).__name__
            raise ValueError(f"LanguageModel: a loss needs a head that gives logits, got {got}")
        places: Any = {"positions": positions, "types": types}
        x, hidden = self.hidden(params, tokens, mask=mask, dropout_key=dropout_key, **places)
        around = self._around_head(params, mask, dropout_key)
        loss, top = self.head.loss(x, params.head, targets=targets, **around, **options)
        cache: LossCache[LanguageModelParams]
        cache = LossCache(saved(LanguageModelCache(hidden, top)), loss)
        if not (self.load_balancing_weight or self.router_z_weight):
            return loss, cache
        more, routers = self._router_loss(hidden.stack, mask)
        return loss + more, BalancedLossCache(cache, routers)

    @renamed.arguments(how="pooling")
    def pooled(
        self,
        params: LanguageModelParams,
        tokens: Array,
        *,
        mask: Array | None = None,
        pooling: str = "mean",
        normalize: bool = False,
        types: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, PooledCache]:
        """One vector (B, D) for each sequence: the "mean", "first" or "last" of its hidden states.

        pooling "pooler": BERT's, of a model with that head. normalize: to length 1.
        """
        from xformer.layers.pooling import POOLINGS, pool

        if pooling not in (*POOLINGS, "pooler"):
            raise ValueError(
                f"pooled: pooling must be one of {', '.join(POOLINGS)}, pooler, got {pooling!r}"
            )
        if pooling == "pooler" and not hasattr(self.head, "pooled"):
            raise ValueError('pooled: pooling "pooler" needs a model with a Pooler')
        x, hidden = self.hidden(params, tokens, mask=mask, types=types, dropout_key=dropout_key)
        pooler = norm = None
        y, pool_cache = pool(x, pooling="first" if pooling == "pooler" else pooling, mask=mask)
        if pooling == "pooler" and self.head is not None and hasattr(self.head, "pooled"):
            y, pooler = self.head.pooled(y, params.head)
        if normalize:
            y, norm = ops.l2_normalize(y)
        return y, saved(PooledCache(hidden, pool_cache, pooler, norm, params.head))

    def _router_loss(self, cache: Any, mask: Array | None) -> tuple[Array, RouterLossCache]:
        """The auxiliary losses of all routers together."""
        mixed = [i for i, config in enumerate(self.blocks) if config.experts is not None]
        routers = [cache.blocks[i].router for i in mixed]
        xp = array_namespace(routers[0].router_logits)
        logits = xp.concat([router.router_logits for router in routers])  # (layers * N, E)
        ids = xp.concat([router.ids for router in routers])
        rows = routers[0].router_logits.shape[0]
        kept = None if mask is None else xp.tile(xp.reshape(mask, (rows,)), (len(mixed),))
        balance, balance_cache = ops.load_balancing(logits, ids=ids, mask=kept)
        z, z_cache = ops.router_z_loss(logits, mask=kept)
        weights = self.load_balancing_weight, self.router_z_weight
        return weights[0] * balance + weights[1] * z, saved(
            RouterLossCache(balance_cache, z_cache, weights, tuple(mixed), len(self.blocks))
        )


@short
class LanguageModelParams(NamedTuple):
    """Parameters of a LanguageModel."""

    embed: EmbedParams | None
    stack: StackParams
    head: Any  # of the head's own type; None: no head, or one that is tied to embed.table


@short
class HiddenCache(NamedTuple):
    """What `LanguageModel.hidden` keeps for its backward."""

    embed: Any
    stack: Any

    def backward(
        self, dx: Array, drouter_logits: tuple[Any, ...] | None = None
    ) -> LanguageModelParams:
        """Gradients of params, but for the head."""
        return self.backward_all(dx, drouter_logits)[0]

    def backward_all(
        self, dx: Array, drouter_logits: tuple[Any, ...] | None = None
    ) -> tuple[LanguageModelParams, Array | None]:
        """Gradients of params, but for the head, and of vectors that stand for tokens."""
        dx, dstack, _, _, dpos, _ = self.stack.backward(dx, drouter_logits)
        dembed = None if self.embed is None else self.embed.backward(dx, dpos)
        grads = LanguageModelParams(dembed, dstack, None)
        return grads, dx if self.embed is None else None


@short
class LanguageModelCache(NamedTuple):
    """What `LanguageModel.forward` keeps for its backward, or its loss, of which dy is dloss."""

    hidden: HiddenCache
    head: Any

    def backward(
        self, dy: Array, drouter_logits: tuple[Any, ...] | None = None
    ) -> LanguageModelParams:
        """Gradients of params; the two uses of a tied table add.

        drouter_logits: as in `layers.StackCache.backward`.
        """
        return self.backward_all(dy, drouter_logits)[0]

    def backward_all(
        self, dy: Array, drouter_logits: tuple[Any, ...] | None = None
    ) -> tuple[LanguageModelParams, Array | None]:
        """Gradients of params, and of vectors that stand for tokens."""
        dhead = dtable = None
        if self.head is not None:
            dy, dhead, dtable = self.head.backward(dy)
        grads, dtokens = self.hidden.backward_all(dy, drouter_logits)
        dembed = grads.embed
        if dtable is not None and dembed is not None:
            dembed = dembed._replace(table=dembed.table + dtable)
        return grads._replace(embed=dembed, head=dhead), dtokens


@short
class BalancedLossCache(NamedTuple):
    """What `LanguageModel.loss` keeps where routers have losses of their own."""

    tokens: LossCache[LanguageModelParams]
    routers: RouterLossCache

    def backward(self, dloss: Array | None = None) -> LanguageModelParams:
        """Gradients of params; dloss is 1 unless given."""
        dloss = one(self.tokens.value) if dloss is None else dloss
        grads: LanguageModelParams = self.tokens.model.backward(dloss, self.routers.backward(dloss))
        return grads


@short
class RouterLossCache(NamedTuple):
    """What the auxiliary losses of routers keep for their backward."""

    balance: Any
    z: Any
    weights: tuple[float, float]
    layers: tuple[int, ...]  # those with a router
    n_layers: int

    def backward(self, dloss: Array) -> tuple[Array | None, ...]:
        """Of each layer dlogits of its router, or None."""
        balance, z = self.weights
        dlogits = balance * self.balance.backward(dloss) + z * self.z.backward(dloss)
        rows = dlogits.shape[0] // len(self.layers)
        per_layer: list[Array | None] = [None] * self.n_layers
        for n, i in enumerate(self.layers):
            per_layer[i] = dlogits[n * rows : (n + 1) * rows, :]
        return tuple(per_layer)


@short
class PooledCache(NamedTuple):
    """What `LanguageModel.pooled` keeps for its backward."""

    hidden: HiddenCache
    pool: Any
    pooler: Any
    norm: Any
    head: Any  # its parameters, for zeros in their place where they were not used

    def backward(self, dy: Array) -> LanguageModelParams:
        """Gradients of params; zero for a head that was not used."""
        if self.norm is not None:
            dy = self.norm.backward(dy)
        if self.pooler is not None:
            dy, dhead = self.pooler.backward(dy)
        else:
            dhead = zeros_of(self.head)
        return self.hidden.backward(self.pool.backward(dy))._replace(head=dhead)
