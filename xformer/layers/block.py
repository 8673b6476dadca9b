"""One block of an encoder or a decoder: self-attention, cross-attention, feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from xformer import layers, ops
from xformer.backends import Generator
from xformer.checks import finite, number, plain_numbers
from xformer.choices import require_one_of
from xformer.initializers import Draw, xavier_uniform
from xformer.layers.attention import AttentionParams, KeyValue, attention
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.feed_forward import FeedForwardConfig, FeedForwardParams, feed_forward
from xformer.layers.kv_cache import KVCache
from xformer.layers.norm import NormConfig, NormParams
from xformer.layers.residual import (
    Branch,
    BranchCache,
    ResidualsCache,
    Sublayer,
    Terms,
    parallels,
    residuals,
    summed,
)
from xformer.showing import short
from xformer.typing import Array

SITES = 6  # dropout streams of a block
NORMS = ("pre", "post", "sandwich", "output", "none")
NO_CROSS = "block: cross-attention needs an AttentionConfig"


@dataclass(frozen=True)
class BlockConfig:
    """The configuration of a block. ValueError for options that do not fit together.

    norm_placement: "pre": x + f(norm(x)); "post": norm(x + f(x)); "sandwich":
        x + norm'(f(norm(x))); "output": x + norm(f(x)); "none": x + f(x)
    parallel: x + attn(norm(x)) + ffn(norm'(x)), with "pre"; x + attn(x) + ffn(x), with "none"
    shared_norm: with parallel and "pre", x + attn(norm(x)) + ffn(norm(x))
    attn_norm: if False, the self-attention has no norm, and the others stay: with "pre" it is
        x + f(x), with "post" too
    residual_scale: the initial value of a learned number for each sublayer, which multiplies its
        output: x + alpha f(norm(x)), ... (0: ReZero, arXiv:2003.04887). None: no number
    residual_multiplier: m, a fixed number that multiplies what each sublayer adds to x:
        x + m f(norm(x)), ... (Granite)
    reversible: y1 = x1 + attn(norm(x2)), y2 = x2 + ffn(norm'(y1)) on two streams
        (`layers.blocks`); backward rebuilds x1 and x2 from y1 and y2. Not with "post", parallel or
        experts.
    """

    attn: AttentionConfig | layers.LatentAttentionConfig | layers.GatedDeltaNetConfig
    ffn: FeedForwardConfig | layers.ExpertsConfig
    norm: NormConfig = NormConfig()  # noqa: RUF009 - frozen
    norm_placement: str = "pre"
    parallel: bool = False
    shared_norm: bool = False
    attn_norm: bool = True
    dropout: float = 0.0  # of the output of each sublayer
    residual_scale: float | None = None
    residual_multiplier: float = 1.0
    reversible: bool = False

    def __post_init__(self) -> None:
        plain_numbers(self)
        if not isinstance(self.norm, NormConfig):
            raise TypeError(f"block: norm must be a NormConfig, got {self.norm!r:.60}")
        is_usual = isinstance(self.attn, AttentionConfig)  # then the others are not imported
        if not is_usual and not isinstance(
            self.attn, layers.LatentAttentionConfig | layers.GatedDeltaNetConfig
        ):
            raise TypeError(
                "block: attn must be an AttentionConfig, LatentAttentionConfig or "
                f"GatedDeltaNetConfig, got {self.attn!r:.60}"
            )
        is_dense = isinstance(self.ffn, FeedForwardConfig)  # then experts are not imported
        if not is_dense and not isinstance(self.ffn, layers.ExpertsConfig):
            raise TypeError(
                f"block: ffn must be a FeedForwardConfig or ExpertsConfig, got {self.ffn!r:.60}"
            )
        is_short = isinstance(self.ffn, FeedForwardConfig) and not self.ffn.down
        if is_short and self.ffn.d_ff != self.d_model:
            raise ValueError(
                f"block: ffn without down needs d_ff = d_model = {self.d_model}, "
                f"got {self.ffn.d_ff}"
            )
        number("block", "dropout", self.dropout, low=0, high=1)
        require_one_of("block: norm_placement", self.norm_placement, NORMS)
        if self.parallel and self.norm_placement not in ("pre", "none"):
            raise ValueError(
                f'block: parallel needs norm_placement "pre" or "none", got {self.norm_placement!r}'
            )
        if self.shared_norm and not (self.parallel and self.norm_placement == "pre"):
            raise ValueError('block: shared_norm needs parallel, with norm_placement "pre"')
        if self.parallel and not self.attn_norm:
            raise ValueError("block: parallel needs attn_norm")
        if self.residual_scale is not None:
            finite("block", "residual_scale", self.residual_scale)
        finite("block", "residual_multiplier", self.residual_multiplier)
        if self.reversible:
            self._require_invertible()

    def _require_invertible(self) -> None:
        """ValueError unless a block's input can be rebuilt from its output."""
        if self.norm_placement == "post":
            raise ValueError(
                'block: reversible needs another norm_placement than "post", '
                "whose norm of the sum cannot be inverted"
            )
        if self.parallel:
            raise ValueError("block: reversible excludes parallel")
        if self.experts is not None:
            raise ValueError(
                "block: reversible excludes experts: rounding of the rebuilt input could change "
                "the choice of experts"
            )

    @property
    def d_model(self) -> int:
        """D, the width of the hidden states."""
        return self.attn.d_model

    @property
    def experts(self) -> layers.ExpertsConfig | None:
        """The configuration of the mixture of experts; None if ffn is a dense network."""
        return None if isinstance(self.ffn, FeedForwardConfig) else self.ffn

    def sublayer(self, fn: Sublayer) -> Sublayer:
        """`fn`, as the block calls it: unchanged. A part of a block has it between collectives."""
        return fn

    @property
    def final_norm(self) -> bool:
        """Whether a stack of these blocks ends with a norm if its configuration does not say."""
        return self.norm_placement not in ("post", "none")

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
        out_scale: multiplies the last weights of each residual branch, unless a residual_scale does
        """
        if self.residual_scale is not None:
            out_scale = 1.0
        options: Any = {"draw": draw, "out_scale": out_scale}
        attn = self.attn.init(rng, self.norm, **options)
        crossing = None
        if cross:
            if not isinstance(self.attn, AttentionConfig):
                raise ValueError(NO_CROSS)
            crossing = self.attn.cross_init(rng, self.norm, shared_memory=shared_memory, **options)
        before = self.norm_placement not in ("output", "none")
        after = self.norm_placement in ("sandwich", "output")

        def norm(has: bool) -> NormParams | None:
            return self.norm.init(rng, self.d_model) if has else None

        def scale(has: bool = True) -> Array | None:
            number = self.residual_scale
            return None if number is None or not has else rng.full((1,), number)

        return BlockParams(
            norm(before and self.attn_norm),
            attn,
            norm(before and cross),
            crossing,
            norm(before and not self.shared_norm),
            self._feed_forward_init(rng, draw, out_scale),
            norm(after and self.attn_norm),
            norm(after and cross),
            norm(after),
            scale(),
            scale(cross),
            scale(),
        )

    def _feed_forward_init(
        self, rng: Generator, draw: Draw, out_scale: float
    ) -> FeedForwardParams | layers.ExpertsParams:
        if isinstance(self.ffn, FeedForwardConfig):
            return self.ffn.init(rng, self.d_model, draw=draw, out_scale=out_scale)
        return self.ffn.init(rng, self.d_model, draw=draw)


@short
class BlockParams(NamedTuple):
    """Parameters of one block. A norm or a scale that is None is left out."""

    attn_norm: NormParams | None
    attn: AttentionParams | layers.LatentAttentionParams | layers.GatedDeltaNetParams
    cross_norm: NormParams | None
    cross: AttentionParams | None  # None: an encoder block, or one of a decoder-only model
    ffn_norm: NormParams | None
    ffn: FeedForwardParams | layers.ExpertsParams
    attn_out_norm: NormParams | None = None  # of a sublayer's output
    cross_out_norm: NormParams | None = None
    ffn_out_norm: NormParams | None = None
    attn_scale: Array | None = None  # (1,), which multiplies the sublayer's output
    cross_scale: Array | None = None
    ffn_scale: Array | None = None


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
    segment_memory: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[Array, BlockCache | ParallelBlockCache]:
    """y = ffn(cross(attn(x), memory)), each with residual, norm and dropout (`layers.residual`).

    With config.parallel, attention and feed-forward read the same x (`layers.parallel`).

    x, y: (B, T, D), or one sequence (T, D)
    memory: (B, S, D) or (S, D), or a KeyValue, which several layers may share; needed if and only
        if params.cross is given
    bias, mask, causal, rotary, kv_cache, segment_memory: of the self-attention
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
        segment_memory=segment_memory,
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
    dropout_key: ops.RandomKey | None = None,
    **options: Any,
) -> tuple[Terms, BlockCache | ParallelBlockCache]:
    """`block` of x + r, with its output as two terms. y is their sum; None is 0.

    The next block computes the sum and its norm in one op (`layers.residuals`). In backward, dy is
    the gradient of the sum of the terms, and dx is the gradient of x + r. For the other arguments
    and the options see `block`.
    """
    if config.reversible:
        raise ValueError("block: a reversible block has two streams: call layers.blocks")
    branches = branches_of(
        params,
        memory,
        bias,
        pos,
        memory_pos,
        config=config,
        dropout_key=dropout_key,
        **options,
    )
    rate = config.dropout if dropout_key is not None else 0.0
    residual_options: dict[str, Any] = {"config": config.norm, "dropout_rate": rate}
    residual_options["multiplier"] = config.residual_multiplier
    if config.parallel:
        first, second = branches
        residual_options["dropout_keys"] = first.dropout_key, second.dropout_key
        args = first.norm, first.sublayer, second.sublayer, second.norm, first.scale, second.scale
        terms, both = parallels(x, *args, r, **residual_options)
        return terms, ParallelBlockCache(both)
    placement = "post" if config.norm_placement == "post" else "pre"
    terms, chain = residuals(x, branches, r, norm_placement=placement, **residual_options)
    return terms, BlockCache(chain)


def branches_of(
    params: BlockParams,
    memory: Array | KeyValue | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    config: BlockConfig,
    rotary: layers.RopeTables | None = None,
    kv_cache: KVCache | None = None,
    segment_memory: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.RandomKey | None = None,
) -> list[Branch]:
    """The residual branches of a block: self-attention, cross-attention if any, feed-forward.

    For the arguments see `block`. ValueError for parameters that do not fit config and memory.
    """
    _require_memory(params, config, memory, memory_pos, memory_mask)
    is_dense = isinstance(config.ffn, FeedForwardConfig)
    if is_dense != isinstance(params.ffn, FeedForwardParams):
        wanted = "FeedForwardParams" if is_dense else "ExpertsParams"
        got = type(params.ffn).__name__
        raise ValueError(f"block: params.ffn must be {wanted} by config, got {got}")
    dropped = dropout_key is not None
    attn_options = _attention_options(config, dropped)
    keys = [dropout_key and dropout_key.at(site) for site in range(SITES)]
    attn, attn_params = config.attn, params.attn
    if not isinstance(attn, AttentionConfig):
        _require_of(attn, attn_params, pos, segment_memory)

    def attend(x: Array) -> tuple[Array, Any]:
        options: Any = {"mask": mask, "causal": causal, "dropout_key": keys[0]}
        options |= {"rotary": rotary, "kv_cache": kv_cache}
        ready: Any = attn_params
        if not isinstance(attn, AttentionConfig):
            return attn.attend(x, ready, bias, **options)
        options |= {"window": attn.window, "segment_memory": segment_memory}
        return attention(x, ready, None, bias, pos, **options, **attn_options)

    def attend_memory(x: Array) -> tuple[Array, Any]:
        cross: Any = params.cross
        options = {"mask": memory_mask, "dropout_key": keys[1], **attn_options}
        return attention(x, cross, memory, None, pos, memory_pos, **options)

    def feed(x: Array) -> tuple[Array, Any]:
        ffn: Any = params.ffn
        if not isinstance(config.ffn, FeedForwardConfig):
            return layers.mixture(x, ffn, config=config.ffn)
        activation = config.ffn.activation
        if config.ffn.chunk_len is not None:
            from xformer.layers.chunked import chunked_feed_forward

            options: Any = {"chunk_len": config.ffn.chunk_len, "activation": activation}
            return chunked_feed_forward(x, ffn, **options)
        options = {"dropout_rate": config.ffn.dropout if dropped else 0.0}
        return feed_forward(x, ffn, activation=activation, dropout_key=keys[5], **options)

    around = (
        (params.attn_norm, params.attn_out_norm, params.attn_scale, keys[2]),
        (params.cross_norm, params.cross_out_norm, params.cross_scale, keys[3]),
        (params.ffn_norm, params.ffn_out_norm, params.ffn_scale, keys[4]),
    )
    branches = [Branch(config.sublayer(attend), *around[0])]
    if params.cross is not None:
        branches.append(Branch(config.sublayer(attend_memory), *around[1]))
    branches.append(Branch(config.sublayer(feed), *around[2]))
    return branches


def _attention_options(config: BlockConfig, dropped: bool) -> dict[str, Any]:
    """The options of `attention` for self- and cross-attention; none for another layer."""
    attn = config.attn
    if not isinstance(attn, AttentionConfig):
        return {}
    return {
        "n_heads": attn.n_heads,
        "n_kv_heads": attn.n_kv_heads,
        "qk_norm": config.norm,
        "softcap": attn.softcap,
        "scale": attn.scale,
        "dropout_rate": attn.dropout if dropped else 0.0,
    }


@short
class BlockCache(NamedTuple):
    """Saved by `block` for backward: the caches of its two or three sublayers and their sums."""

    chain: ResidualsCache  # of self-attention, cross-attention if any, and feed-forward

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

    @property
    def extended(self) -> Array | None:
        """The segment memory of the self-attention, followed by its input."""
        extended: Array | None = self.attn.sublayer.extended
        return extended

    def backward(self, dy: Array, *drouter_logits: Array) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos, in that order.

        drouter_logits: the gradient of an auxiliary loss on the router, if any.
        """
        dx, grads = self.chain.backward(dy, *drouter_logits)
        return dx, *block_gradients(*grads)


def block_gradients(
    attn: tuple[Any, ...], *others: tuple[Any, ...]
) -> tuple[BlockParams, Any, Any, Any, Any]:
    """Gradients of params, memory, bias, pos and memory_pos, from the gradients of each branch.

    attn, others: of self-attention, of cross-attention if any, and of feed-forward, each as
        `ResidualsCache.backward` returns them.
    """
    *cross, ffn = others
    dattn_norm, dattn_out, dattn_scale, *of_attn = attn
    dattn, dbias, dpos = _self_attention_gradients(*of_attn)
    dffn_norm, dffn_out, dffn_scale, dffn = ffn
    dcross_norm = dcross_out = dcross_scale = dcross = dmemory = dmemory_pos = None
    if cross:
        dcross_norm, dcross_out, dcross_scale, dcross, *of_memory = cross[0]
        dmemory, _, dcross_pos, dmemory_pos = of_memory
        if dcross_pos is not None:
            dpos = dpos + dcross_pos
    after = dattn_out, dcross_out, dffn_out, dattn_scale, dcross_scale, dffn_scale
    dparams = BlockParams(dattn_norm, dattn, dcross_norm, dcross, dffn_norm, dffn, *after)
    return dparams, dmemory, dbias, dpos, dmemory_pos


def _self_attention_gradients(dparams: Any, *others: Any) -> tuple[Any, Any, Any]:
    """dparams, dbias and dpos, from the gradients after dx of the layer.

    `latent_attention` has no memory and no pos, and `gated_delta_net` has no bias either.
    """
    if len(others) < 2:
        return dparams, *others, *(None,) * (2 - len(others))
    _, dbias, dpos, _ = others
    return dparams, dbias, dpos


@short
class ParallelBlockCache(NamedTuple):
    """Saved by a parallel `block` for backward: the cache of `parallels`, of both sublayers."""

    both: Any

    @property
    def router(self) -> Any:
        """The cache of the mixture of experts."""
        return self.both.second

    @property
    def kv_cache(self) -> KVCache:
        """Keys and values of the self-attention so far."""
        return self.both.first.kv_cache

    @property
    def extended(self) -> Array | None:
        """The segment memory of the self-attention, followed by its input."""
        return self.both.first.extended

    def backward(self, dy: Array, *drouter_logits: Array) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos; None for the memory's.

        drouter_logits: the gradient of an auxiliary loss on the router, if any.
        """
        dx, dattn_norm, dffn_norm, *dscales, attn, (dffn,) = self.both.backward(dy, *drouter_logits)
        dattn, dbias, dpos = _self_attention_gradients(*attn)
        dparams = BlockParams(dattn_norm, dattn, None, None, dffn_norm, dffn)
        dparams = dparams._replace(attn_scale=dscales[0], ffn_scale=dscales[1])
        return dx, dparams, None, dbias, dpos, None


def _require_of(
    config: layers.LatentAttentionConfig | layers.GatedDeltaNetConfig,
    params: Any,
    pos: Array | None,
    segment_memory: Array | None,
) -> None:
    """ValueError for parameters of another layer, and for inputs that only `attention` has."""
    is_latent = isinstance(config, layers.LatentAttentionConfig)
    kind = layers.LatentAttentionParams if is_latent else layers.GatedDeltaNetParams
    if not isinstance(params, kind):
        wanted, got = kind.__name__, type(params).__name__
        raise ValueError(f"block: params.attn must be {wanted} by config, got {got}")
    for name, given in (("pos", pos), ("segment_memory", segment_memory)):
        if given is not None:
            what = "latent attention" if is_latent else "a gated DeltaNet"
            raise ValueError(f"block: {what} has no {name}, which needs AttentionConfig")


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
    if params.cross is not None and not isinstance(config.attn, AttentionConfig):
        raise ValueError(NO_CROSS)
    if params.cross is not None and (config.parallel or config.reversible):
        kind = "parallel" if config.parallel else "reversible"
        raise ValueError(f"block: {kind} has no cross-attention, got params.cross")
