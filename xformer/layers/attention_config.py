"""The configuration of attention in a block, and its initial parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from xformer.base.typing import Array
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import number, plain_numbers, require_cap, require_sizes
from xformer.initializers import Draw, xavier_uniform
from xformer.layers.attention import (
    AttentionCache,
    AttentionParams,
    KeyValueParams,
    ShawParams,
    XLParams,
    attention,
)
from xformer.layers.linear import BiasParams, LinearParams
from xformer.layers.norm import NormConfig, NormParams
from xformer.layers.protocol import Context, SideInputs
from xformer.ops._attention import window_of


@dataclass(frozen=True)
class AttentionConfig:
    """The configuration of a block's attention. ValueError for options that do not fit together.

    `window`, `sinks`, `shaw_max_distance` and `xl` are for the self-attention only. The other
    options are for the cross-attention too.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int | None = None  # None: n_heads
    d_head: int | None = None  # None: d_model / n_heads
    d_value: int | None = None  # None: d_head
    bias: bool = True
    qkv_bias: bool | None = None  # of the projections to queries, keys, values; None: bias
    o_bias: bool | None = None  # of the output projection; None: bias
    output_gate: bool = False  # a gate of the concatenated heads, sigmoid(x w_gate)
    output: str = "linear"  # of the concatenated heads: a projection; or only a "bias", or "none"
    qk_norm: str | None = None  # a norm of queries and keys: of each "head", or of "all" heads
    scale: float | None = None  # of the scores; None: d_head^-1/2
    window: tuple[int | None, int | None] | None = None  # (left, right), of `ops.sdpa`
    softcap: float | None = None  # of the scores
    sinks: bool = False  # a learned sink for each head
    # L of Shaw's relative positions (arXiv:1803.02155)
    shaw_max_distance: int | None = None
    # Relative positions of Transformer-XL (arXiv:1901.02860). Each layer has biases of its own.
    xl: bool = False
    dropout: float = 0.0  # of the probabilities

    recurrent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        plain_numbers(self)
        sizes = {"d_model": self.d_model, "n_heads": self.n_heads, "n_kv_heads": self.kv_heads}
        require_sizes("attention", 1, **sizes)
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(
                f"attention: n_heads = {self.n_heads} must divide d_model = {self.d_model}, "
                "or d_head must be given"
            )
        require_sizes("attention", 1, d_head=self.head_width, d_value=self.value_width)
        number("attention", "dropout", self.dropout, low=0, high=1)
        if self.scale is not None:
            number("attention", "scale", self.scale)
        window_of("attention", self.window)
        window: Any = self.window
        if isinstance(window, list):
            object.__setattr__(self, "window", tuple(window))  # so that it can be hashed
        if self.softcap is not None:
            require_cap("attention", self.softcap)
        if self.shaw_max_distance is not None:
            require_sizes("attention", 0, shaw_max_distance=self.shaw_max_distance)
            if self.sinks or (self.window, self.softcap) != (None, None):
                raise ValueError("attention: shaw_max_distance excludes sinks, window and softcap")
        if self.xl:
            others = ("sinks", "window", "softcap", "shaw_max_distance")
            values = {name: getattr(self, name) for name in others}
            if present := [n for n, v in values.items() if v is not None and v is not False]:
                raise ValueError(f"attention: xl excludes {', '.join(present)}")
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"attention: n_kv_heads = {self.kv_heads} must divide {self.n_heads} heads"
            )
        if self.output not in ("linear", "bias", "none"):
            raise ValueError(
                f'attention: output must be "linear", "bias" or "none", got {self.output!r}'
            )
        if self.output != "linear":
            if self.o_bias is not None:
                raise ValueError(f'attention: o_bias needs output "linear", got {self.output!r}')
            if (width := self.n_heads * self.value_width) != self.d_model:
                raise ValueError(
                    f"attention: output {self.output!r} needs heads of d_model = {self.d_model} "
                    f"together, got n_heads * d_value = {width}"
                )
        if self.qk_norm not in (None, "head", "all"):
            raise ValueError(
                f'attention: qk_norm must be None, "head" or "all", got {self.qk_norm!r}'
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

    @property
    def cached_width(self) -> int:
        """G * (K + M), how many numbers of a token are in the KV cache."""
        return self.kv_heads * (self.head_width + self.value_width)

    def forward(
        self,
        x: Array,
        params: AttentionParams,
        side: SideInputs,
        norm: NormConfig,
        context: Context,
    ) -> tuple[Array, AttentionCache]:
        """`layers.attention`, as a block calls each of its layers. norm: of the block."""
        return attention(x, params, side, config=self, norm=norm, context=context)

    def init(
        self,
        rng: Generator,
        norm: NormConfig,
        *,
        draw: Draw = xavier_uniform,
        out_scale: float = 1.0,
    ) -> AttentionParams:
        """Initial parameters of a self-attention.

        norm: the configuration of the norm of queries and keys
        draw: the distribution of the weights
        out_scale: multiplies the weights of the output projection, if there is one
        """
        params = self.cross_init(rng, norm, draw=draw, out_scale=out_scale)
        if self.sinks:
            params = params._replace(sinks=rng.full((self.n_heads,), 0.0))
        if self.shaw_max_distance is not None:
            widths = (self.head_width, self.value_width)
            tables = (draw(rng, (2 * self.shaw_max_distance + 1, width)) for width in widths)
            params = params._replace(shaw=ShawParams(*tables))
        if self.xl:
            shape = (self.d_model, self.kv_heads * self.head_width)
            r = LinearParams.init(rng, shape, draw=draw, bias=False)
            biases = (rng.full((self.n_heads * self.head_width,), 0.0) for _ in range(2))
            params = params._replace(xl=XLParams(r, *biases))
        return params

    def cross_init(
        self,
        rng: Generator,
        norm: NormConfig,
        *,
        shared_memory: bool = False,
        draw: Draw = xavier_uniform,
        out_scale: float = 1.0,
    ) -> AttentionParams:
        """Initial parameters of a cross-attention. See `init`.

        shared_memory: without a projection to keys and values
        """
        q = self._qkv_init(rng, self.n_heads * self.head_width, draw)
        kv = None if shared_memory else self.key_value_init(rng, norm, draw=draw)
        o = self._output_init(rng, draw, out_scale)
        gate = None
        if self.output_gate:
            gate = self._qkv_init(rng, self.n_heads * self.value_width, draw)
        return AttentionParams(q, kv, o, self._qk_norm_init(rng, norm, self.n_heads), gate=gate)

    def key_value_init(
        self, rng: Generator, norm: NormConfig, *, draw: Draw = xavier_uniform
    ) -> KeyValueParams:
        """Initial projections of a sequence of width d_model to keys and values."""
        widths = (self.head_width, self.value_width)
        k, v = (self._qkv_init(rng, self.kv_heads * width, draw) for width in widths)
        return KeyValueParams(k, v, self._qk_norm_init(rng, norm, self.kv_heads))

    def _output_init(
        self, rng: Generator, draw: Draw, scale: float
    ) -> LinearParams | BiasParams | None:
        width = self.n_heads * self.value_width
        if self.output == "linear":
            bias = self.bias if self.o_bias is None else self.o_bias
            return LinearParams.init(rng, (width, self.d_model), draw=draw, bias=bias, scale=scale)
        return BiasParams(rng.full((width,), 0.0)) if self.output == "bias" else None

    def _qkv_init(self, rng: Generator, width: int, draw: Draw) -> LinearParams:
        bias = self.bias if self.qkv_bias is None else self.qkv_bias
        return LinearParams.init(rng, (self.d_model, width), draw=draw, bias=bias)

    def _qk_norm_init(self, rng: Generator, norm: NormConfig, n_heads: int) -> NormParams | None:
        if self.qk_norm is None:
            return None
        return norm.init(rng, self.head_width * (n_heads if self.qk_norm == "all" else 1))
