"""One block of an encoder or a decoder: self-attention, cross-attention, feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from xformer import layers, ops, renamed
from xformer.backends import Generator
from xformer.checks import number, plain_numbers, require_cap, require_sizes
from xformer.initializers import Draw, xavier_uniform
from xformer.layers.attention import (
    AttentionParams,
    KeyValue,
    KeyValueParams,
    ShawParams,
    attention,
)
from xformer.layers.feed_forward import FeedForwardParams, feed_forward
from xformer.layers.kv_cache import KVCache
from xformer.layers.linear import LinearParams
from xformer.layers.norm import NormConfig, NormParams
from xformer.layers.residual import (
    Branch,
    BranchCache,
    ResidualsCache,
    Terms,
    parallels,
    residuals,
    summed,
)
from xformer.ops._attention import window_of
from xformer.ops.activation import require_activation
from xformer.showing import short
from xformer.typing import Array

SITES = 6  # dropout streams of a block
NORMS = ("pre", "post", "sandwich", "output")


@renamed.arguments(
    norm=("norm_placement", ("pre", "post", "sandwich", "output")),
    norm_kind="norm",
    shaw="shaw_max_distance",
)
@dataclass(frozen=True)
class BlockConfig:
    """The configuration of a block. ValueError for options that do not fit together.

    norm_placement: "pre": x + f(norm(x)); "post": norm(x + f(x)); "sandwich":
        x + norm'(f(norm(x))); "output": x + norm(f(x))
    parallel: x + attn(norm(x)) + ffn(norm'(x)), with "pre" only
    shared_norm: with parallel, x + attn(norm(x)) + ffn(norm(x))
    """

    d_model: int
    n_heads: int
    d_ff: int
    n_kv_heads: int | None = None  # None: n_heads
    d_head: int | None = None  # None: d_model / n_heads
    d_value: int | None = None  # None: d_head
    activation: str = "relu"
    gated: bool = False
    experts: layers.ExpertsConfig | None = None  # instead of the feed-forward network
    norm_placement: str = "pre"
    norm: str = "layer"  # or "rms"
    norm_offset: float = 0.0  # added to the weight of "rms"
    eps: float = 1e-5
    parallel: bool = False
    shared_norm: bool = False
    bias: bool = True
    qkv_bias: bool | None = None  # of the projections to queries, keys, values; None: bias
    o_bias: bool | None = None  # of attention's output projection; None: bias
    ffn_bias: bool | None = None  # of the feed-forward network; None: bias
    qk_norm: str | None = None  # a norm of queries and keys: of each "head", or of "all" heads
    scale: float | None = None  # of the scores; None: d_head^-1/2
    window: tuple[int | None, int | None] | None = None  # of the self-attention (`ops.sdpa`)
    softcap: float | None = None  # of the scores
    sinks: bool = False  # a learned sink for each head of the self-attention
    # L of Shaw's relative positions in the self-attention (arXiv:1803.02155)
    shaw_max_distance: int | None = None
    dropout: float = 0.0
    attn_dropout: float | None = None  # of the attention's probabilities; None: dropout
    hidden_dropout: float = 0.0  # inside the feed-forward network

    norm_kind = renamed.attribute("norm")
    shaw = renamed.attribute("shaw_max_distance")

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_sizes(
            "block",
            1,
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_ff=self.d_ff,
            n_kv_heads=self.kv_heads,
        )
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(
                f"block: n_heads = {self.n_heads} must divide d_model = {self.d_model}, "
                "or d_head must be given"
            )
        require_sizes("block", 1, d_head=self.head_width, d_value=self.value_width)
        for name in ("dropout", "probs_dropout", "hidden_dropout"):
            number("block", name, getattr(self, name), low=0, high=1)
        if self.scale is not None:
            number("block", "scale", self.scale)
        window_of("block", self.window)
        if self.softcap is not None:
            require_cap("block", self.softcap)
        if self.shaw_max_distance is not None:
            require_sizes("block", 0, shaw_max_distance=self.shaw_max_distance)
            if self.sinks or (self.window, self.softcap) != (None, None):
                raise ValueError("block: shaw_max_distance excludes sinks, window and softcap")
        if self.experts is not None and self.hidden_dropout:
            raise ValueError("block: experts have no hidden_dropout")
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"block: n_kv_heads = {self.kv_heads} must divide {self.n_heads} heads"
            )
        if self.norm_placement not in NORMS:
            names = ", ".join(f'"{name}"' for name in NORMS)
            raise ValueError(
                f"block: norm_placement must be one of {names}, got {self.norm_placement!r}"
            )
        if self.parallel and self.norm_placement != "pre":
            raise ValueError(
                f'block: parallel needs norm_placement "pre", got {self.norm_placement!r}'
            )
        if self.shared_norm and not self.parallel:
            raise ValueError("block: shared_norm needs parallel")
        if self.qk_norm not in (None, "head", "all"):
            raise ValueError(f'block: qk_norm must be None, "head" or "all", got {self.qk_norm!r}')
        require_activation("block", self.activation)
        self.norm_config  # noqa: B018 - built here for its checks

    @property
    def kv_heads(self) -> int:
        """G, the number of key/value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        """K, the width of a query or key head."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def value_width(self) -> int:
        """M, the width of a value head."""
        return self.head_width if self.d_value is None else self.d_value

    @property
    def probs_dropout(self) -> float:
        """The dropout rate of the attention's probabilities."""
        return self.dropout if self.attn_dropout is None else self.attn_dropout

    @property
    def norm_config(self) -> NormConfig:
        """The configuration of every norm of the block."""
        return NormConfig(self.norm, self.eps, self.norm_offset)

    def init(
        self,
        rng: Generator,
        *,
        cross: bool = False,
        shared_memory: bool = False,
        draw: Draw = xavier_uniform,
        out_scale: float = 1.0,
    ) -> BlockParams:
        """Initial parameters.

        cross: with cross-attention
        shared_memory: the cross-attention has no projection to keys and values
        draw: the distribution of the weights
        out_scale: multiplies the last weights of each residual branch
        """
        attn = self._attention_init(rng, True, draw, out_scale)
        if self.sinks:
            attn = attn._replace(sinks=rng.full((self.n_heads,), 0.0))
        if self.shaw_max_distance is not None:
            widths = (self.head_width, self.value_width)
            tables = (draw(rng, (2 * self.shaw_max_distance + 1, width)) for width in widths)
            attn = attn._replace(shaw=ShawParams(*tables))
        crossing = None
        if cross:
            crossing = self._attention_init(rng, not shared_memory, draw, out_scale)
        inner, outer = (
            self.norm_placement != "output",
            self.norm_placement in ("sandwich", "output"),
        )
        return BlockParams(
            self._norm_init(rng) if inner else None,
            attn,
            self._norm_init(rng) if cross and inner else None,
            crossing,
            self._norm_init(rng) if inner and not self.shared_norm else None,
            self._feed_forward_init(rng, draw, out_scale),
            self._norm_init(rng) if outer else None,
            self._norm_init(rng) if cross and outer else None,
            self._norm_init(rng) if outer else None,
        )

    def key_value_init(self, rng: Generator, *, draw: Draw = xavier_uniform) -> KeyValueParams:
        """Initial projections of a sequence of width d_model to keys and values."""
        k, v = (
            self._linear(rng, (self.d_model, self.kv_heads * width), draw, self.qkv_bias)
            for width in (self.head_width, self.value_width)
        )
        return KeyValueParams(k, v, self._qk_norm_init(rng, self.kv_heads))

    def _attention_init(
        self, rng: Generator, own_memory: bool, draw: Draw, out_scale: float
    ) -> AttentionParams:
        q = self._linear(rng, (self.d_model, self.n_heads * self.head_width), draw, self.qkv_bias)
        kv = self.key_value_init(rng, draw=draw) if own_memory else None
        shape = (self.n_heads * self.value_width, self.d_model)
        o = self._linear(rng, shape, draw, self.o_bias, out_scale)
        return AttentionParams(q, kv, o, self._qk_norm_init(rng, self.n_heads))

    def _feed_forward_init(
        self, rng: Generator, draw: Draw, out_scale: float
    ) -> FeedForwardParams | layers.ExpertsParams:
        if self.experts is not None:
            return self.experts.init(rng, self.d_model, draw=draw)
        up = self._linear(rng, (self.d_model, self.d_ff), draw, self.ffn_bias)
        down = self._linear(rng, (self.d_ff, self.d_model), draw, self.ffn_bias, out_scale)
        gate = None
        if self.gated:
            gate = self._linear(rng, (self.d_model, self.d_ff), draw, self.ffn_bias)
        return FeedForwardParams(up, down, gate)

    def _linear(
        self,
        rng: Generator,
        shape: tuple[int, int],
        draw: Draw,
        bias: bool | None,
        scale: float = 1.0,
    ) -> LinearParams:
        p = LinearParams.init(rng, shape, draw=draw, bias=self.bias if bias is None else bias)
        return p if scale == 1.0 else p._replace(w=p.w * scale)

    def _norm_init(self, rng: Generator) -> NormParams:
        return self.norm_config.init(rng, self.d_model, bias=self.bias)

    def _qk_norm_init(self, rng: Generator, n_heads: int) -> NormParams | None:
        if self.qk_norm is None:
            return None
        width = self.head_width * (n_heads if self.qk_norm == "all" else 1)
        return self.norm_config.init(rng, width, bias=self.bias)


@short
class BlockParams(NamedTuple):
    """Parameters of one block. A norm that is None is left out."""

    attn_norm: NormParams | None
    attn: AttentionParams
    cross_norm: NormParams | None
    cross: AttentionParams | None  # None: an encoder block, or one of a decoder-only model
    ffn_norm: NormParams | None
    ffn: FeedForwardParams | layers.ExpertsParams
    attn_out_norm: NormParams | None = None  # of a sublayer's output
    cross_out_norm: NormParams | None = None
    ffn_out_norm: NormParams | None = None


def block(
    x: Array,
    params: BlockParams,
    memory: Array | KeyValue | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    config: BlockConfig,
    rotary: layers.RopeTables | None = None,
    kv_cache: KVCache | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[Array, BlockCache | ParallelBlockCache]:
    """y = ffn(cross(attn(x), memory)), each with residual, norm and dropout (`layers.residual`).

    With config.parallel, attention and feed-forward read the same x (`layers.parallel`).

    x, y: (B, T, D)
    memory: (B, S, D), or a KeyValue, which several layers may share; needed if and only if
        params.cross is given
    bias, mask, causal, rotary, kv_cache: of the self-attention
    pos, memory_pos: added to queries, keys and values (`layers.attention`)
    memory_mask: of the cross-attention
    dropout_key: None: no dropout
    ValueError for shapes and arguments that do not fit together.
    """
    terms, cache = block_terms(
        x,
        params,
        memory,
        bias,
        pos,
        memory_pos,
        config=config,
        rotary=rotary,
        kv_cache=kv_cache,
        mask=mask,
        causal=causal,
        memory_mask=memory_mask,
        dropout_key=dropout_key,
    )
    return summed(*terms), cache


def block_terms(
    x: Array,
    params: BlockParams,
    memory: Array | KeyValue | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    r: Array | None = None,
    config: BlockConfig,
    rotary: layers.RopeTables | None = None,
    kv_cache: KVCache | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[Terms, BlockCache | ParallelBlockCache]:
    """`block` of x + r, with its output as two terms. y is their sum; None is 0.

    The next block computes the sum and its norm in one op (`layers.residuals`). In backward, dy is
    the gradient of the sum of the terms, and dx is the gradient of x + r. For the other arguments
    see `block`.
    """
    _require_memory(params, config, memory, memory_pos, memory_mask)
    dropped = dropout_key is not None
    rate = config.dropout if dropped else 0.0
    keys = [dropout_key and dropout_key.at(site) for site in range(SITES)]
    attn_options: dict[str, Any] = {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "qk_norm": config.norm_config,
        "softcap": config.softcap,
        "scale": config.scale,
        "dropout_rate": config.probs_dropout if dropped else 0.0,
    }
    residual_options: dict[str, Any] = {"config": config.norm_config, "dropout_rate": rate}

    def attend(x: Array) -> tuple[Array, Any]:
        options: Any = {"mask": mask, "causal": causal, "window": config.window}
        options |= {"rotary": rotary, "kv_cache": kv_cache, "dropout_key": keys[0]}
        return attention(x, params.attn, None, bias, pos, **options, **attn_options)

    def attend_memory(x: Array) -> tuple[Array, Any]:
        cross: Any = params.cross
        options = {"mask": memory_mask, "dropout_key": keys[1], **attn_options}
        return attention(x, cross, memory, None, pos, memory_pos, **options)

    def feed(x: Array) -> tuple[Array, Any]:
        if config.experts is not None and isinstance(params.ffn, layers.ExpertsParams):
            return layers.mixture(x, params.ffn, config=config.experts)
        options: Any = {"dropout_rate": config.hidden_dropout if dropped else 0.0}
        ffn: Any = params.ffn
        return feed_forward(x, ffn, activation=config.activation, dropout_key=keys[5], **options)

    if config.parallel:
        norms: Any = (params.attn_norm, params.ffn_norm)
        options: Any = {"dropout_keys": (keys[2], keys[4]), **residual_options}
        terms, both = parallels(x, norms[0], attend, feed, norms[1], r, **options)
        return terms, ParallelBlockCache(both)
    branches = [Branch(attend, params.attn_norm, params.attn_out_norm, keys[2])]
    if params.cross is not None:
        branches.append(Branch(attend_memory, params.cross_norm, params.cross_out_norm, keys[3]))
    branches.append(Branch(feed, params.ffn_norm, params.ffn_out_norm, keys[4]))
    place = "post" if config.norm_placement == "post" else "pre"
    terms, chain = residuals(x, branches, r, place=place, **residual_options)
    return terms, BlockCache(chain)


@short
class BlockCache(NamedTuple):
    """Saved by `block` for backward."""

    chain: ResidualsCache

    @property
    def attn(self) -> BranchCache:
        """The cache of the self-attention."""
        return self.chain.branches[0]

    @property
    def cross(self) -> BranchCache | None:
        """The cache of the cross-attention; None without one."""
        return self.chain.branches[1] if len(self.chain.branches) == 3 else None

    @property
    def router(self) -> Any:
        """The cache of the mixture of experts."""
        return self.chain.branches[-1].sublayer

    @property
    def kv_cache(self) -> KVCache:
        """Keys and values of the self-attention so far."""
        kv_cache: KVCache = self.attn.sublayer.kv_cache
        return kv_cache

    def backward(self, dy: Array, *drouter_logits: Array) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos, in that order.

        drouter_logits: the gradient of an auxiliary loss on the router, if any.
        """
        dx, (attn, *cross, ffn) = self.chain.backward(dy, *drouter_logits)
        dattn_norm, dattn_out, dattn, _, dbias, dpos, _ = attn
        dffn_norm, dffn_out, dffn = ffn
        dcross_norm = dcross_out = dcross = dmemory = dcross_pos = dmemory_pos = None
        if cross:
            dcross_norm, dcross_out, dcross, dmemory, _, dcross_pos, dmemory_pos = cross[0]
        if dcross_pos is not None:
            dpos = dpos + dcross_pos
        norms = (dattn_out, dcross_out, dffn_out)
        dparams = BlockParams(dattn_norm, dattn, dcross_norm, dcross, dffn_norm, dffn, *norms)
        return dx, dparams, dmemory, dbias, dpos, dmemory_pos


@short
class ParallelBlockCache(NamedTuple):
    """Saved by a parallel `block` for backward."""

    both: Any

    @property
    def router(self) -> Any:
        """The cache of the mixture of experts."""
        return self.both.second

    @property
    def kv_cache(self) -> KVCache:
        """Keys and values of the self-attention so far."""
        return self.both.first.kv_cache

    def backward(self, dy: Array, *drouter_logits: Array) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos; None for the memory's.

        drouter_logits: the gradient of an auxiliary loss on the router, if any.
        """
        dx, dattn_norm, dffn_norm, attn, (dffn,) = self.both.backward(dy, *drouter_logits)
        dattn, _, dbias, dpos, _ = attn
        dparams = BlockParams(dattn_norm, dattn, None, None, dffn_norm, dffn)
        return dx, dparams, None, dbias, dpos, None


def _require_memory(
    params: BlockParams,
    config: BlockConfig,
    memory: Array | KeyValue | None,
    memory_pos: Array | None,
    memory_mask: Array | None,
) -> None:
    if (params.cross is None) != (memory is None):
        have = "no params.cross" if params.cross is None else "params.cross but no memory"
        raise ValueError(f"block: memory and params.cross need each other, got {have}")
    if params.cross is None and not (memory_pos is None and memory_mask is None):
        raise ValueError("block: memory_pos and memory_mask need a memory, and there is none")
    if config.parallel and params.cross is not None:
        raise ValueError("block: parallel has no cross-attention, got params.cross")
