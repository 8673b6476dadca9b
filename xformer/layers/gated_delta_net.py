"""Gated DeltaNet: a recurrent layer instead of attention (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.dispatch import is_inference
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import number, plain_numbers, require_mask, require_sizes
from xformer.initializers import Draw, xavier_uniform
from xformer.layers.attention import merge_heads, split_heads
from xformer.layers.linear import LinearParams, linear, linear_many
from xformer.layers.norm import NormConfig, NormParams, norm
from xformer.layers.protocol import Context, LayerConfig, SideInputs, require_no
from xformer.layers.recurrent_state import RecurrentState
from xformer.ops.causal_conv import joined

QK_EPS = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True)
class GatedDeltaNetConfig(LayerConfig):
    """The configuration of a block's gated DeltaNet, instead of an `AttentionConfig`.

    arXiv:2412.06464, as Qwen3.5 has it. It is causal, and reads no positions: RoPE of the model is
    for other layers.

    ValueError for values out of range.
    """

    d_model: int
    n_heads: int  # H, of values
    d_key: int  # K
    d_value: int  # M
    n_key_heads: int | None = None  # G, of queries and keys; None: n_heads
    conv_len: int = 4  # L, the steps that the convolution reads
    eps: float = 1e-6  # of the norm of each head's output

    dropout: ClassVar[float] = 0.0
    recurrent: ClassVar[bool] = True
    cached_width: ClassVar[int] = 0  # numbers of a token that are stored: the state is all

    def __post_init__(self) -> None:
        plain_numbers(self)
        names = ("d_model", "n_heads", "d_key", "d_value", "kv_heads", "conv_len")
        require_sizes("gated_delta_net", 1, **{name: getattr(self, name) for name in names})
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"gated_delta_net: n_key_heads = {self.kv_heads} must divide {self.n_heads} heads"
            )
        number("gated_delta_net", "eps", self.eps, low=0)

    @property
    def kv_heads(self) -> int:
        """G, the number of query and key heads."""
        return self.n_heads if self.n_key_heads is None else self.n_key_heads

    @property
    def head_width(self) -> int:
        """K, the width of a query or key head."""
        return self.d_key

    @property
    def value_width(self) -> int:
        """M, the width of a value head."""
        return self.d_value

    @property
    def norm(self) -> NormConfig:
        """The configuration of the norm of each head's output."""
        return NormConfig("rms", self.eps)

    @property
    def widths(self) -> tuple[int, int, int]:
        """(G * K, G * K, H * M), the columns of queries, keys and values."""
        keys = self.kv_heads * self.d_key
        return keys, keys, self.n_heads * self.d_value

    def init(
        self,
        rng: Generator,
        _norm: NormConfig,
        *,
        draw: Draw = xavier_uniform,
        out_scale: float = 1.0,
    ) -> GatedDeltaNetParams:
        """Initial parameters: weights by `draw`, decay rates between 1 and 16, as in Mamba-2.

        _norm: of the block; the norm of the heads' output is always an RMSNorm
        out_scale: multiplies the weights of the output projection
        """

        def linear(width: int) -> LinearParams:
            return LinearParams.init(rng, (self.d_model, width), draw=draw, bias=False)

        *_, inner = self.widths
        qkv, gate, beta, decay = map(linear, (sum(self.widths), inner, self.n_heads, self.n_heads))
        conv = rng.normal((self.conv_len, sum(self.widths)), std=self.conv_len**-0.5)
        log_rate = rng.uniform((self.n_heads,), low=0.0, high=math.log(16))
        decay = decay._replace(b=rng.full((self.n_heads,), 1.0))
        shape = (inner, self.d_model)
        o = LinearParams.init(rng, shape, draw=draw, bias=False, scale=out_scale)
        head_norm = self.norm.init(rng, self.d_value)
        return GatedDeltaNetParams(qkv, conv, gate, beta, decay, log_rate, head_norm, o)

    def forward(
        self,
        x: Array,
        params: GatedDeltaNetParams,
        side: SideInputs,
        _norm: NormConfig,
        context: Context,
    ) -> tuple[Array, GatedDeltaNetCache]:
        """`gated_delta_net`, as a block calls each of its layers."""
        return gated_delta_net(x, params, side, config=self, context=context)


@short
class GatedDeltaNetParams(NamedTuple):
    """Parameters of `gated_delta_net`."""

    qkv: LinearParams  # (D, 2 G * K + H * M), to queries, keys and values
    conv: Array  # (L, 2 G * K + H * M), of `ops.causal_conv`
    gate: LinearParams  # (D, H * M)
    beta: LinearParams  # (D, H)
    decay: LinearParams  # (D, H)
    log_rate: Array  # (H,), of `ops.log_decay`
    norm: NormParams  # (M,), of each head's output
    o: LinearParams  # (H * M, D)


def gated_delta_net(
    x: Array,
    params: GatedDeltaNetParams,
    side: SideInputs = SideInputs(),
    *,
    config: GatedDeltaNetConfig,
    context: Context = Context(causal=True),
) -> tuple[Array, GatedDeltaNetCache]:
    """y = (silu(x w_gate) * rms_norm(heads)) w_o, heads = gated_delta_rule(q, k, v, decay, beta).

    q, k, v = silu(causal_conv(x w_qkv)); q and k of each head are scaled to length 1
    (arXiv:2412.06464, section 3.4). decay = log_decay(x w_decay + b), beta = sigmoid(x w_beta).

    x, y: (B, T, D), or one sequence (T, D)
    context.mask: (B, 1, 1, S), of padding as attention takes it, whose last T entries are of x; x
        counts as 0 where it is False
    context.kv_cache: the state after earlier tokens, which has no gradient. The cache's `kv_cache`
        is the state after x; None without one. If it is static, mask is not read.
    ValueError for shapes that do not fit, and for inputs that this layer cannot follow.
    """
    require_no("gated_delta_net", side, SideInputs._fields)
    require_no("gated_delta_net", context, ("memory_mask", "rotary", "segment_memory"))
    if not context.causal:
        raise ValueError("gated_delta_net: causal must be True, got False")
    mask, kv_cache = context.mask, context.kv_cache
    shape, xp = x.shape, array_namespace(x)
    x = _batched(x)
    if kv_cache is not None and kv_cache.write_index is not None:
        mask = None  # slots have no padding
    if mask is not None:
        mask = _tokens(mask, x)
        x = xp.where(mask[..., None], x, 0.0)
    layers = (params.qkv, params.gate, params.beta, params.decay)
    (qkv, gate, beta, decay), maps = linear_many(x, layers)
    earlier = RecurrentState() if kv_cache is None else kv_cache
    mixed, conv = ops.causal_conv(qkv, value(params.conv), earlier.conv)
    mixed, silu = ops.silu(mixed)
    q, k, v = _split(mixed, config)
    (q, q_norm), (k, k_norm) = (ops.rms_norm(a, eps=QK_EPS / config.d_key) for a in (q, k))
    unit = config.d_key**-0.5  # rows of q and k have the length K^1/2
    beta, beta_cache = ops.sigmoid(beta)  # (B, T, H)
    log_decay, decay_cache = ops.log_decay(decay, value(params.log_rate))
    log_decay, beta = (xp.permute_dims(a, (0, 2, 1)) for a in (log_decay, beta))  # (B, H, T)
    (ctx, state), core = ops.gated_delta_rule(
        q, unit * k, v, log_decay, beta, earlier.state, scale=unit**2
    )
    ctx, head_norm = norm(ctx, params.norm, config=config.norm)
    gated, glu = ops.glu(gate, merge_heads(ctx))
    y, o = linear(gated, params.o)
    if kv_cache is not None:
        last = joined(earlier.conv, qkv, config.conv_len - 1)[:, x.shape[1] :, :]
        kv_cache = RecurrentState(last, state, kv_cache.write_index)
    frozen = tuple(isinstance(a, Frozen) for a in (params.conv, params.log_rate))
    y = xp.reshape(y, (*shape[:-1], y.shape[-1]))
    before = (maps, conv, silu, q_norm, k_norm, beta_cache, decay_cache)
    after = (core, head_norm, glu, o)
    mask = None if is_inference() else mask
    sizes = config.n_heads, config.d_key
    return y, GatedDeltaNetCache(*before, *after, *sizes, frozen, mask, kv_cache)


@short
class GatedDeltaNetCache(NamedTuple):
    """Saved by `gated_delta_net` for backward: the caches of its ops, and the mask of tokens."""

    maps: Any  # of x, to qkv, gate, beta and decay
    conv: Any  # of `ops.causal_conv`
    silu: Any
    q_norm: Any  # of `ops.rms_norm`
    k_norm: Any
    beta: Any  # of `ops.sigmoid`
    decay: Any  # of `ops.log_decay`
    core: Any  # of `ops.gated_delta_rule`
    norm: Any
    glu: Any
    o: Any
    n_heads: int
    d_key: int
    frozen: tuple[bool, ...]  # whether conv and log_rate are frozen
    mask: Array | None  # (B, T)
    kv_cache: RecurrentState | None  # after x

    def backward(self, dy: Array) -> tuple[Array, GatedDeltaNetParams, SideInputs]:
        """Gradients of x, params and side. The gradient of the earlier state is dropped."""
        xp, shape = array_namespace(dy), dy.shape
        unit = self.d_key**-0.5
        dgated, do = self.o.backward(_batched(dy))
        dgate, dheads = self.glu.backward(dgated)
        dctx, dnorm = self.norm.backward(split_heads(dheads, self.n_heads))
        dq, dk, dv, dlog_decay, dbeta, _ = self.core.backward(dctx)
        (dq, _), (dk, _) = self.q_norm.backward(dq), self.k_norm.backward(unit * dk)
        dmixed = xp.concat([merge_heads(a) for a in (dq, dk, dv)], axis=-1)
        dqkv, dconv, _ = self.conv.backward(self.silu.backward(dmixed))
        dlog_decay, dbeta = (xp.permute_dims(a, (0, 2, 1)) for a in (dlog_decay, dbeta))
        ddecay, dlog_rate = self.decay.backward(dlog_decay)
        dx, dmaps = self.maps.backward(dqkv, dgate, self.beta.backward(dbeta), ddecay)
        if self.mask is not None:
            dx = xp.where(self.mask[..., None], dx, 0.0)
        dconv, dlog_rate = (
            None if is_frozen else grad
            for is_frozen, grad in zip(self.frozen, (dconv, dlog_rate), strict=True)
        )
        dqkv, dgate, dbeta, ddecay = dmaps
        dparams = GatedDeltaNetParams(
            dqkv, dconv, dgate, dbeta, ddecay, dlog_rate, norm=dnorm, o=do
        )
        return xp.reshape(dx, (*shape[:-1], dx.shape[-1])), dparams, SideInputs()


def _batched(x: Array) -> Array:
    """(B, T, D), from (T, D) or (B, T, D)."""
    if x.ndim not in (2, 3):
        raise ValueError(
            f"gated_delta_net: x must be (B, T, D) or (T, D), got shape {tuple(x.shape)}"
        )
    return x if x.ndim == 3 else x[None, ...]


def _split(x: Array, config: GatedDeltaNetConfig) -> tuple[Array, Array, Array]:
    """Queries and keys (B, G, T, K) and values (B, H, T, M), from their columns of x."""
    width, _, inner = config.widths
    if x.shape[-1] != 2 * width + inner:
        raise ValueError(
            f"gated_delta_net: qkv.w must have 2 G K + H M = {2 * width + inner} columns, "
            f"got {x.shape[-1]}"
        )
    q, k = x[..., :width], x[..., width : 2 * width]
    heads = config.kv_heads, config.kv_heads, config.n_heads
    parts = zip((q, k, x[..., 2 * width :]), heads, strict=True)
    q, k, v = (split_heads(part, n) for part, n in parts)
    return q, k, v


def _tokens(mask: Array, x: Array) -> Array:
    """(B, T), the mask of the tokens x, the last ones of `mask` (B, 1, 1, S)."""
    require_mask("gated_delta_net", "mask", mask, x)
    batch, n_steps = (1, *x.shape)[-3:-1]
    if mask.ndim != 4 or tuple(mask.shape[1:3]) != (1, 1) or mask.shape[3] < n_steps:
        raise ValueError(
            f"gated_delta_net: mask must be of padding, (B, 1, 1, S), got shape {tuple(mask.shape)}"
        )
    last = mask[:, 0, 0, mask.shape[3] - n_steps :]
    return array_namespace(mask).broadcast_to(last, (batch, n_steps))
