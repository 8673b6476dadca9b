"""One block of an encoder or a decoder: self-attention, cross-attention, feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from xformer import layers
from xformer.base.choices import require_one_of
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import finite, number, plain_numbers
from xformer.initializers import Draw, xavier_uniform
from xformer.layers.attention import AttentionParams
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.feed_forward import FeedForwardConfig, FeedForwardParams
from xformer.layers.kv_cache import KVCache
from xformer.layers.norm import NormConfig, NormParams
from xformer.layers.protocol import SITES, Context, LayerConfig, SideInputs, rate
from xformer.layers.residual import (
    Branch,
    BranchCache,
    ParallelCache,
    ResidualsCache,
    Sublayer,
    Terms,
    parallel,
    residuals,
    summed,
)

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

    attn: AttentionConfig | LayerConfig
    ffn: LayerConfig
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
        if not isinstance(self.attn, AttentionConfig):
            _require_layer("attn", "an AttentionConfig", self.attn, ("init", "forward", "d_model"))
        _require_layer("ffn", "a FeedForwardConfig", self.ffn, ("init", "forward"))
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
        """The configuration of the mixture of experts; None if ffn is another layer."""
        is_mixture = hasattr(self.ffn, "n_experts")
        return cast("layers.ExpertsConfig", self.ffn) if is_mixture else None

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
            self._feed_forward_init(rng, options),
            norm(after and self.attn_norm),
            norm(after and cross),
            norm(after),
            scale(),
            scale(cross),
            scale(),
        )

    def _feed_forward_init(self, rng: Generator, options: dict[str, Any]) -> Any:
        if self.experts is not None:
            return self.ffn.init(rng, self.d_model, draw=options["draw"])
        return self.ffn.init(rng, self.d_model, **options)


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
    side: SideInputs = SideInputs(),
    *,
    config: BlockConfig,
    context: Context = Context(),
) -> tuple[Array, BlockCache]:
    """y = ffn(cross(attn(x), memory)), each with residual, norm and dropout (`layers.residual`).

    With config.parallel, attention and feed-forward read the same x (`layers.parallel`).

    x, y: (B, T, D), or one sequence (T, D)
    side.memory: needed if and only if params.cross is given; a KeyValue may be shared by layers
    side.bias: of the self-attention
    ValueError for shapes and arguments that do not fit together.
    """
    terms, cache = block_terms(x, params, side, config=config, context=context)
    return summed(*terms), cache


def block_terms(
    x: Array,
    params: BlockParams,
    side: SideInputs,
    r: Array | None = None,
    *,
    config: BlockConfig,
    context: Context,
) -> tuple[Terms, BlockCache]:
    """`block` of x + r, with its output as two terms. y is their sum; None is 0.

    The next block computes the sum and its norm in one op (`layers.residuals`). In backward, dy is
    the gradient of the sum of the terms, and dx is the gradient of x + r.
    """
    if config.reversible:
        raise ValueError("block: a reversible block has two streams: call layers.blocks")
    branches = branches_of(params, side, config, context)
    options: Any = {"config": config.norm, "multiplier": config.residual_multiplier}
    options["dropout_rate"] = rate(config.dropout, context)
    if config.parallel:
        terms, both = parallel(x, branches, r, **options)
        return terms, BlockCache(both)
    placement = "post" if config.norm_placement == "post" else "pre"
    terms, chain = residuals(x, branches, r, norm_placement=placement, **options)
    return terms, BlockCache(chain)


def branches_of(
    params: BlockParams, side: SideInputs, config: BlockConfig, context: Context
) -> list[Branch]:
    """The residual branches of a block: self-attention, cross-attention if any, feed-forward.

    ValueError for parameters that do not fit config and side.
    """
    _require_memory(params, config, side, context)
    memory, bias, pos, memory_pos = side
    key = context.dropout_key
    keys = [key and key.at(site) for site in range(SITES)]
    own = context._replace(memory_mask=None, dropout_key=keys[0])
    parts: Any = [("attn", config.attn, SideInputs(bias=bias, pos=pos), own, keys[2])]
    if params.cross is not None:
        of_memory = SideInputs(memory, None, pos, memory_pos)
        crossing = Context(context.memory_mask, dropout_key=keys[1])
        parts.append(("cross", config.attn, of_memory, crossing, keys[3]))
    parts.append(("ffn", config.ffn, SideInputs(), Context(dropout_key=keys[5]), keys[4]))
    branches = []
    for name, layer, inputs, how, after in parts:
        of_layer = getattr(params, name)
        _require_kind(name, layer, of_layer)
        fn = config.sublayer(_bound(layer, of_layer, inputs, config.norm, how))
        around = {part: getattr(params, f"{name}_{part}") for part in ("norm", "out_norm", "scale")}
        branches.append(Branch(fn, **around, dropout_key=after))
    return branches


def _bound(layer: Any, params: Any, side: SideInputs, norm: NormConfig, context: Context) -> Any:
    return lambda x: layer.forward(x, params, side, norm, context)


@short
class BlockCache(NamedTuple):
    """Saved by `block` for backward: the caches of its two or three sublayers and their sums."""

    chain: ResidualsCache | ParallelCache  # of self-attention, cross-attention, feed-forward

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

    def backward(self, dy: Array, *drouter_logits: Array) -> tuple[Array, BlockParams, SideInputs]:
        """Gradients of x, params and side.

        drouter_logits: the gradient of an auxiliary loss on the router, if any.
        """
        dx, grads = self.chain.backward(dy, *drouter_logits)
        return dx, *block_gradients(*grads)


def block_gradients(*branches: tuple[Any, ...]) -> tuple[BlockParams, SideInputs]:
    """Gradients of params and side.

    branches: the gradients of self-attention, cross-attention if any, and feed-forward, as
        `ResidualsCache.backward` returns them
    """
    names = ("attn", "cross", "ffn") if len(branches) == 3 else ("attn", "ffn")
    fields: dict[str, Any] = {"cross": None, "cross_norm": None}
    dside = SideInputs()
    for name, grads in zip(names, branches, strict=True):
        dnorm, dout_norm, dscale, dparams, *more = grads
        fields |= {name: dparams, f"{name}_norm": dnorm}
        fields |= {f"{name}_out_norm": dout_norm, f"{name}_scale": dscale}
        for of_layer in more:
            dside = dside.plus(of_layer)
    return BlockParams(**fields), dside


def _require_layer(name: str, usual: str, layer: Any, parts: tuple[str, ...]) -> None:
    """TypeError unless `layer` is a `LayerConfig` with `parts`."""
    missing = [part for part in parts if not hasattr(layer, part)]
    if not isinstance(layer, LayerConfig):
        raise TypeError(f"block: {name} must be {usual} or a layers.LayerConfig, got {layer!r:.60}")
    if missing:
        got = f"{type(layer).__name__} without {' and '.join(missing)}"
        raise TypeError(f"block: {name} must have {', '.join(parts)}, got {got}")


def _require_kind(name: str, layer: Any, params: Any) -> None:
    """ValueError unless a layer with a (subclass of) `SomeConfig` has `SomeParams`."""
    wanted = [f"{kind.__name__.removesuffix('Config')}Params" for kind in type(layer).__mro__]
    if (got := type(params).__name__) not in wanted:
        raise ValueError(f"block: params.{name} must be {wanted[0]} by config, got {got}")


def _require_memory(
    params: BlockParams, config: BlockConfig, side: SideInputs, context: Context
) -> None:
    if (params.cross is None) != (side.memory is None):
        have = "no params.cross" if params.cross is None else "params.cross but no memory"
        raise ValueError(f"block: memory and params.cross need each other, got {have}")
    if params.cross is None:
        if not (side.memory_pos is None and context.memory_mask is None):
            raise ValueError("block: memory_pos and memory_mask need a memory, and there is none")
        return
    if not isinstance(config.attn, AttentionConfig):
        raise ValueError(NO_CROSS)
    if config.parallel or config.reversible:
        kind = "parallel" if config.parallel else "reversible"
        raise ValueError(f"block: {kind} has no cross-attention, got params.cross")
