"""One layer of an encoder or a decoder: self-attention, cross-attention if any, feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from xformer import ops
from xformer.backends.base import Generator
from xformer.checks import number, require_sizes
from xformer.initial import Draw, xavier_uniform
from xformer.layers.attention import AttentionParams, KeyValue, KeyValueParams, attention
from xformer.layers.feed_forward import ACTIVATIONS, FeedForwardParams, feed_forward
from xformer.layers.linear import LinearParams
from xformer.layers.norm import LayerNormParams
from xformer.layers.residual import residual
from xformer.typing import Array

SITES = 5  # places in a block where dropout draws


@dataclass(frozen=True)
class BlockConfig:
    """Sizes and choices of a block. ValueError for ones that do not fit together."""

    d_model: int
    n_heads: int
    d_ff: int
    n_kv_heads: int | None = None  # n_heads unless given
    d_head: int | None = None  # d_model / n_heads unless given
    d_value: int | None = None  # d_head unless given
    activation: str = "relu"
    norm: str = "pre"  # or "post"
    eps: float = 1e-5
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
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
                "or d_head be given"
            )
        require_sizes("block", 1, d_head=self.head_width, d_value=self.value_width)
        number("block", "eps", self.eps, low=0)
        number("block", "dropout", self.dropout, low=0, high=1)
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"block: n_kv_heads = {self.kv_heads} must divide {self.n_heads} heads"
            )
        if self.norm not in ("pre", "post"):
            raise ValueError(f'block: norm must be "pre" or "post", got {self.norm!r}')
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"block: activation must be one of {', '.join(ACTIVATIONS)}, "
                f"got {self.activation!r}"
            )

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

    def init(
        self,
        rng: Generator,
        *,
        cross: bool = False,
        shared_memory: bool = False,
        draw: Draw = xavier_uniform,
        out_scale: float = 1.0,
    ) -> BlockParams:
        """Initial parameters; `out_scale` multiplies the weights that end a residual branch.

        cross: with cross-attention; shared_memory: whose keys and values come from outside.
        """

        def linear(shape: tuple[int, int], scale: float = 1.0) -> LinearParams:
            p = LinearParams.init(rng, shape, draw=draw, bias=self.bias)
            return p if scale == 1.0 else p._replace(w=p.w * scale)

        def attn(own_memory: bool) -> AttentionParams:
            q = linear((self.d_model, self.n_heads * self.head_width))
            kv = self.key_value_init(rng, draw=draw) if own_memory else None
            return AttentionParams(
                q, kv, linear((self.n_heads * self.value_width, self.d_model), out_scale)
            )

        def norm() -> LayerNormParams:
            return LayerNormParams.init(rng, self.d_model, bias=self.bias)

        return BlockParams(
            norm(),
            attn(own_memory=True),
            norm() if cross else None,
            attn(own_memory=not shared_memory) if cross else None,
            norm(),
            FeedForwardParams(
                linear((self.d_model, self.d_ff)), linear((self.d_ff, self.d_model), out_scale)
            ),
        )

    def key_value_init(self, rng: Generator, *, draw: Draw = xavier_uniform) -> KeyValueParams:
        """Initial projections of a sequence of width d_model to keys and values."""
        k, v = (
            LinearParams.init(rng, (self.d_model, self.kv_heads * width), draw=draw, bias=self.bias)
            for width in (self.head_width, self.value_width)
        )
        return KeyValueParams(k, v)


class BlockParams(NamedTuple):
    """Parameters of one block; a norm that is None is left out."""

    attn_norm: LayerNormParams | None
    attn: AttentionParams
    cross_norm: LayerNormParams | None
    cross: AttentionParams | None  # None: an encoder layer, or one of a decoder-only model
    ffn_norm: LayerNormParams | None
    ffn: FeedForwardParams


def block(
    x: Array,
    params: BlockParams,
    memory: Array | KeyValue | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    config: BlockConfig,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.Key | None = None,
) -> tuple[Array, BlockCache]:
    """y = ffn(cross(attn(x), memory)), each with residual, norm and dropout (`layers.residual`).

    x, y: (B, T, D)   memory: (B, S, D), or a KeyValue shared by several layers; wanted where
    params.cross is. bias, mask, causal: of the self-attention; memory_mask: of the other. pos,
    memory_pos: added to queries, keys and values (`layers.attention`). dropout_key None: no
    dropout. ValueError where shapes do not fit.
    """
    if (params.cross is None) != (memory is None):
        have = "no params.cross" if params.cross is None else "params.cross but no memory"
        raise ValueError(f"block: memory and params.cross go together, got {have}")
    if params.cross is None and not (memory_pos is None and memory_mask is None):
        raise ValueError("block: memory_pos and memory_mask go with a memory, and there is none")
    rate = 0.0 if dropout_key is None else config.dropout
    keys = [dropout_key and dropout_key.at(site) for site in range(SITES)]
    heads: dict[str, Any] = {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "dropout_rate": rate,
    }
    around: dict[str, Any] = {"place": config.norm, "eps": config.eps, "dropout_rate": rate}

    def attend(x: Array) -> tuple[Array, Any]:
        return attention(
            x, params.attn, None, bias, pos, mask=mask, causal=causal, dropout_key=keys[0], **heads
        )

    def attend_memory(x: Array) -> tuple[Array, Any]:
        own: Any = params.cross
        options = {"mask": memory_mask, "dropout_key": keys[1], **heads}
        return attention(x, own, memory, None, pos, memory_pos, **options)

    def feed(x: Array) -> tuple[Array, Any]:
        return feed_forward(x, params.ffn, activation=config.activation)

    x, attn = residual(x, params.attn_norm, attend, dropout_key=keys[2], **around)
    cross = None
    if params.cross is not None:
        x, cross = residual(x, params.cross_norm, attend_memory, dropout_key=keys[3], **around)
    y, ffn = residual(x, params.ffn_norm, feed, dropout_key=keys[4], **around)
    return y, BlockCache(attn, cross, ffn)


class BlockCache(NamedTuple):
    """What `block` keeps for its backward."""

    attn: Any
    cross: Any
    ffn: Any

    def backward(self, dy: Array) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos, in that order."""
        dx, dffn_norm, dffn = self.ffn.backward(dy)
        dcross_norm = dcross = dmemory = dcross_pos = dmemory_pos = None
        if self.cross is not None:
            dx, dcross_norm, dcross, dmemory, _, dcross_pos, dmemory_pos = self.cross.backward(dx)
        dx, dattn_norm, dattn, _, dbias, dpos, _ = self.attn.backward(dx)
        if dcross_pos is not None:
            dpos = dpos + dcross_pos
        dparams = BlockParams(dattn_norm, dattn, dcross_norm, dcross, dffn_norm, dffn)
        return dx, dparams, dmemory, dbias, dpos, dmemory_pos
