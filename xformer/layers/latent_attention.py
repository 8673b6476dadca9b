"""Multi-head latent attention (MLA): all keys and values of a token come from a latent vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from xformer import layers, ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.tree import value
from xformer.base.typing import Array
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import number, plain_numbers, require_sizes
from xformer.initializers import Draw, xavier_uniform
from xformer.layers.attention import merge_heads, split_heads
from xformer.layers.kv_cache import KVCache, append
from xformer.layers.linear import LinearParams, linear, linear_many
from xformer.layers.norm import NormConfig, NormParams, norm
from xformer.layers.protocol import Context, LayerConfig, SideInputs, rate, require_no


@dataclass(frozen=True)
class LatentAttentionConfig(LayerConfig):
    """The configuration of a block's latent attention, instead of an `AttentionConfig`.

    It is a self-attention, of DeepSeek-V2 (arXiv:2405.04434, section 2.1) and V3. A head's queries
    and keys have d_nope channels without positions, and d_rope channels for RoPE, whose keys are
    those of all heads. RoPE of the model must have the width d_rope.

    ValueError for values out of range.
    """

    d_model: int
    n_heads: int
    kv_rank: int  # C, the width of the latent vector of keys and values
    d_nope: int  # N
    d_rope: int  # R
    d_value: int  # M
    q_rank: int | None = None  # the width of the latent vector of queries; None: there is none
    bias: bool = False  # of the maps to latent vectors and of the output projection
    eps: float = 1e-6  # of the RMSNorms of the latent vectors
    scale: float | None = None  # of the scores; None: (d_nope + d_rope)^-1/2
    dropout: float = 0.0  # of the probabilities

    def __post_init__(self) -> None:
        plain_numbers(self)
        names = ("d_model", "n_heads", "kv_rank", "d_nope", "d_rope", "d_value")
        sizes = {name: getattr(self, name) for name in names}
        if self.q_rank is not None:
            sizes["q_rank"] = self.q_rank
        require_sizes("latent_attention", 1, **sizes)
        if not isinstance(self.bias, bool):
            raise TypeError(f"latent_attention: bias must be True or False, got {self.bias!r}")
        number("latent_attention", "eps", self.eps, low=0)
        number("latent_attention", "dropout", self.dropout, low=0, high=1)
        if self.scale is not None:
            number("latent_attention", "scale", self.scale)

    @property
    def kv_heads(self) -> int:
        """G, the number of key/value heads: that of the queries."""
        return self.n_heads

    @property
    def head_width(self) -> int:
        """K = N + R, the width of a query or key head."""
        return self.d_nope + self.d_rope

    @property
    def value_width(self) -> int:
        """M, the width of a value head."""
        return self.d_value

    @property
    def cached_width(self) -> int:
        """C + R, how many numbers of a token are in the KV cache."""
        return self.kv_rank + self.d_rope

    def init(
        self,
        rng: Generator,
        _norm: NormConfig,
        *,
        draw: Draw = xavier_uniform,
        out_scale: float = 1.0,
    ) -> LatentAttentionParams:
        """Initial parameters.

        _norm: of the block; latent vectors always have RMSNorms
        draw: the distribution of the weights
        out_scale: multiplies the weights of the output projection
        """

        def linear(i: int, o: int, *, bias: bool = False, scale: float = 1.0) -> LinearParams:
            return LinearParams.init(rng, (i, o), draw=draw, bias=bias, scale=scale)

        def latent(rank: int, shared: int, width: int) -> LatentParams:
            down = linear(self.d_model, rank + shared, bias=self.bias)
            return LatentParams(down, self.norm.init(rng, rank), linear(rank, width))

        width = self.n_heads * self.head_width
        if self.q_rank is None:
            q: LinearParams | LatentParams = linear(self.d_model, width)
        else:
            q = latent(self.q_rank, 0, width)
        kv = latent(self.kv_rank, self.d_rope, self.n_heads * (self.d_nope + self.d_value))
        out = self.n_heads * self.d_value
        o = linear(out, self.d_model, bias=self.bias, scale=out_scale)
        return LatentAttentionParams(q, kv, o)

    @property
    def norm(self) -> NormConfig:
        """The configuration of the norms of latent vectors."""
        return NormConfig("rms", self.eps)

    def forward(
        self,
        x: Array,
        params: LatentAttentionParams,
        side: SideInputs,
        _norm: NormConfig,
        context: Context,
    ) -> tuple[Array, LatentAttentionCache]:
        """`latent_attention`, as a block calls each of its layers."""
        return latent_attention(x, params, side, config=self, context=context)


@short
class LatentParams(NamedTuple):
    """Parameters of a map through a latent vector of C numbers: up(norm(down(x)))."""

    down: LinearParams  # (D, C); to keys and values (D, C + R), with the keys for RoPE last
    norm: NormParams  # (C,)
    up: LinearParams  # (C, H * O). Of keys and values O = N + M: a head's keys, then its values


@short
class LatentAttentionParams(NamedTuple):
    """Parameters of `latent_attention`."""

    q: LinearParams | LatentParams  # to (H * (N + R)), a head's channels for RoPE last
    kv: LatentParams
    o: LinearParams  # (H * M, D)


def latent_attention(
    x: Array,
    params: LatentAttentionParams,
    side: SideInputs = SideInputs(),
    *,
    config: LatentAttentionConfig,
    context: Context = Context(),
) -> tuple[Array, LatentAttentionCache]:
    """y = concat(heads) w_o + b_o, heads = sdpa([q, rope(q')], [k, rope(k')], v).

    k and v of a head come from the latent vector c = rms_norm(x w_down), and k' (R channels) is
    that of all heads (arXiv:2405.04434, eq. 9 to 19).

    x, y: (B, T, D), or one sequence (T, D)
    side.bias, context.mask, causal: of `ops.sdpa`
    context.rotary: RoPE tables of width R; None: no rotation
    context.kv_cache: c and rope(k') of earlier tokens, as its v (B, 1, S, C) and k (B, 1, S, R).
        The cache's `kv_cache` has those of x too, and there is no backward. If it is static, mask
        must hide the slots that are not written.
    ValueError for shapes that do not fit, and for other inputs, which this layer cannot follow.
    Derivation: docs/derivations/latent_attention.md
    """
    require_no("latent_attention", side, ("memory", "pos", "memory_pos"))
    require_no("latent_attention", context, ("memory_mask", "segment_memory"))
    bias = side.bias
    mask, causal, _, rotary, kv_cache, _, dropout_key = context
    of_q: Any = params.q
    is_latent, q_norm, q_up = isinstance(of_q, LatentParams), None, None
    (q, joint), maps = linear_many(x, (of_q.down if is_latent else of_q, params.kv.down))
    _require_width("kv.down", joint, "C + R", config.cached_width)
    if is_latent:
        q, q_norm = norm(q, of_q.norm, config=config.norm)
        q, q_up = linear(q, of_q.up)
    width = config.n_heads * config.head_width
    _require_width("q.up" if is_latent else "q", q, "H (N + R)", width)
    q = split_heads(q, config.n_heads)  # (B, H, T, N + R)
    q_nope, (q_rope, q_turn) = q[..., : config.d_nope], _turned(q[..., config.d_nope :], rotary)
    latent, kv_norm = norm(joint[..., : config.kv_rank], params.kv.norm, config=config.norm)
    k_rope, k_turn = _turned(split_heads(joint[..., config.kv_rank :], 1), rotary)
    options: dict[str, Any] = {
        "mask": mask,
        "causal": causal,
        "scale": config.head_width**-0.5 if config.scale is None else config.scale,
        "dropout_rate": rate(config.dropout, context),
        "dropout_key": dropout_key,
    }
    kv_up = core = None
    absorbs = False
    if kv_cache is not None:
        if kv_cache.write_index is not None and mask is None:
            raise ValueError("latent_attention: a static KV cache needs a mask")
        # Without cached tokens this costs more; adapters, biases and other dtypes need `linear`.
        absorbs = kv_cache.k is not None and _is_plain(params.kv.up, x)
        kv_cache = append(k_rope, split_heads(latent, 1), kv_cache=kv_cache)
        k_rope, latent = kv_cache.k, merge_heads(kv_cache.v, x.ndim)
    if absorbs:
        ctx = _absorbed(q_nope, q_rope, latent, k_rope, params.kv.up, bias, config, options)
    else:
        (k, v), kv_up = _expanded(latent, k_rope, params.kv.up, config)
        q = array_namespace(q).concat([q_nope, q_rope], axis=-1)
        ctx, core = ops.sdpa(q, k, v, bias, **options)
    y, o = linear(merge_heads(ctx, x.ndim), params.o)
    turns = q_turn, k_turn
    sizes = config.n_heads, config.d_nope
    return y, LatentAttentionCache(
        maps, q_norm, q_up, *turns, kv_norm, kv_up, core, o, *sizes, kv_cache
    )


@short
class LatentAttentionCache(NamedTuple):
    """Saved by `latent_attention` for backward: the caches of its maps, norms, rotations and sdpa.

    The rest is splitting and concatenating, which need only sizes.
    """

    maps: Any  # of x, to the queries or their latent vector, and to `kv.down`
    q_norm: Any  # of the latent vector of queries; None: there is none
    q_up: Any
    q_rope: Any  # of `ops.rope`; None: no rotation
    k_rope: Any
    kv_norm: Any
    kv_up: Any
    core: Any  # of `ops.sdpa`
    o: Any
    n_heads: int
    d_nope: int
    kv_cache: KVCache | None  # with the latent vectors of x

    def backward(self, dy: Array) -> tuple[Array, LatentAttentionParams, SideInputs]:
        """Gradients of x, params and side. dk' is the sum over the heads that share k'.

        ValueError if `latent_attention` had a KV cache.
        """
        if self.kv_cache is not None:
            raise ValueError("latent_attention: with a KV cache nothing is saved for a backward")
        n, ndim = self.d_nope, dy.ndim
        xp = array_namespace(dy)
        dheads, do = self.o.backward(dy)
        dq, dk, dv, dbias, _ = self.core.backward(split_heads(dheads, self.n_heads))
        dq = xp.concat([dq[..., :n], _unturned(dq[..., n:], self.q_rope)], axis=-1)
        dq, dq_latent = merge_heads(dq, ndim), None
        if self.q_up is not None:
            dq, dq_up = self.q_up.backward(dq)
            dq, dq_norm = self.q_norm.backward(dq)
            dq_latent = dq_norm, dq_up
        dk_rope = xp.sum(dk[..., n:], axis=1, keepdims=True)  # (B, 1, S, R)
        dlatent, dkv_up = self.kv_up.backward(
            merge_heads(xp.concat([dk[..., :n], dv], axis=-1), ndim)
        )
        dlatent, dkv_norm = self.kv_norm.backward(dlatent)
        djoint = xp.concat([dlatent, merge_heads(_unturned(dk_rope, self.k_rope), ndim)], axis=-1)
        dx, (dfirst, dkv_down) = self.maps.backward(dq, djoint)
        dq_params = dfirst if dq_latent is None else LatentParams(dfirst, *dq_latent)
        dkv = LatentParams(dkv_down, dkv_norm, dkv_up)
        return dx, LatentAttentionParams(dq_params, dkv, do), SideInputs(bias=dbias)


def _turned(x: Array, rotary: layers.RopeTables | None) -> tuple[Array, Any]:
    """rope(x) and its cache; x and None without tables. x: (B, H, T, R)."""
    return (x, None) if rotary is None else ops.rope(x, **rotary._asdict())


def _unturned(dy: Array, cache: Any) -> Array:
    """The gradient of x in `_turned`."""
    return dy if cache is None else cache.backward(dy)


def _expanded(
    latent: Array, k_rope: Array, up: LinearParams, config: LatentAttentionConfig
) -> tuple[tuple[Array, Array], Any]:
    """Keys (B, H, S, N + R) and values (B, H, S, M), and the cache of the map `up`.

    latent: (B, S, C) or (S, C)   k_rope: (B, 1, S, R)
    """
    kv, cache = linear(latent, up)
    _require_width("kv.up", kv, "H (N + M)", config.n_heads * (config.d_nope + config.d_value))
    kv = split_heads(kv, config.n_heads)  # (B, H, S, N + M)
    xp = array_namespace(kv)
    shared = xp.broadcast_to(k_rope, (*kv.shape[:3], config.d_rope))
    k = xp.concat([kv[..., : config.d_nope], shared], axis=-1)
    return (k, kv[..., config.d_nope :]), cache


def _absorbed(
    q_nope: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    up: LinearParams,
    bias: Array | None,
    config: LatentAttentionConfig,
    options: dict[str, Any],
) -> Array:
    """The heads' output (B, H, T, M), without keys and values of each head.

    q (c w_k)^T = (q w_k^T) c^T, and probs (c w_v) = (probs c) w_v: all heads attend to c itself.
    """
    xp = array_namespace(q_nope)
    w = xp.reshape(value(up.w), (config.kv_rank, config.n_heads, -1))  # (C, H, N + M)
    w = xp.permute_dims(w, (1, 0, 2))
    w_k, w_v = w[..., : config.d_nope], w[..., config.d_nope :]
    c = split_heads(latent, 1)  # (B, 1, S, C)
    of_rope = options["scale"] * (q_rope @ k_rope.mT)  # (B, H, T, S)
    bias = of_rope if bias is None else bias + of_rope
    ctx, _ = ops.sdpa(q_nope @ w_k.mT, c, c, bias, **options)  # (B, H, T, C)
    return ctx @ w_v


def _is_plain(up: Any, x: Array) -> bool:
    """Whether `_absorbed` can use `up`: no adapter, no bias, and not in another dtype than x."""
    return isinstance(up, LinearParams) and up.b is None and value(up.w).dtype == x.dtype


def _require_width(name: str, y: Array, letters: str, wanted: int) -> None:
    if y.shape[-1] != wanted:
        raise ValueError(
            f"latent_attention: {name}.w must have {letters} = {wanted} columns, got {y.shape[-1]}"
        )
