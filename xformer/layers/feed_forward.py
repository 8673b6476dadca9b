"""The position-wise feed-forward network: plain or gated, on all tokens or some at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import again, current_contexts, overridable, saved
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import number, plain_numbers, require_gradient, require_sizes
from xformer.initializers import Draw, xavier_uniform
from xformer.layers.linear import LinearParams, linear, linear_many
from xformer.layers.norm import NormConfig
from xformer.layers.protocol import Context, LayerConfig, SideInputs, plus, rate
from xformer.ops.activation import ACTIVATIONS, require_activation
from xformer.ops.barrier import barrier


@dataclass(frozen=True)
class FeedForwardConfig(LayerConfig):
    """The configuration of a feed-forward network.

    chunk_len: the number of tokens whose hidden units are in memory at a time; None: all. With
        chunks, the hidden units are not saved, but computed again in backward.

    ValueError for another activation or size, and for dropout in chunks.
    """

    d_ff: int
    activation: str = "relu"
    gated: bool = False
    bias: bool = True
    dropout: float = 0.0  # of the hidden units
    down: bool = True  # the second linear layer; without it the hidden units are the output
    chunk_len: int | None = None

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_sizes("feed_forward", 1, d_ff=self.d_ff)
        require_activation("feed_forward", self.activation)
        number("feed_forward", "dropout", self.dropout, low=0, high=1)
        if self.chunk_len is not None:
            require_sizes("feed_forward", 1, chunk_len=self.chunk_len)
            if self.dropout:
                raise ValueError(
                    "feed_forward: chunk_len excludes dropout of the hidden units: its mask "
                    "depends on the index in the whole array"
                )

    def forward(
        self,
        x: Array,
        params: FeedForwardParams,
        _side: SideInputs,
        _norm: NormConfig,
        context: Context,
    ) -> tuple[Array, Any]:
        """`feed_forward`, as a block calls each of its layers; in chunks with a chunk_len."""
        if self.chunk_len is not None:
            options: Any = {"chunk_len": self.chunk_len, "activation": self.activation}
            return chunked_feed_forward(x, params, **options)
        options = {"dropout_rate": rate(self.dropout, context), "dropout_key": context.dropout_key}
        return feed_forward(x, params, activation=self.activation, **options)

    def init(
        self,
        rng: Generator,
        d_model: int,
        *,
        draw: Draw = xavier_uniform,
        out_scale: float = 1.0,
    ) -> FeedForwardParams:
        """Initial parameters.

        draw: the distribution of the weights
        out_scale: multiplies the weights of the last linear layer
        """
        shape = (d_model, self.d_ff)
        scale = 1.0 if self.down else out_scale
        up = LinearParams.init(rng, shape, draw=draw, bias=self.bias, scale=scale)
        down = None
        if self.down:
            down = LinearParams.init(rng, shape[::-1], draw=draw, bias=self.bias, scale=out_scale)
        gate = LinearParams.init(rng, shape, draw=draw, bias=self.bias) if self.gated else None
        return FeedForwardParams(up, down, gate)


@short
class FeedForwardParams(NamedTuple):
    """Parameters of a feed-forward network."""

    up: LinearParams  # (D, F)
    down: LinearParams | None  # (F, D); None: the hidden units are the output, and F = D
    gate: LinearParams | None = None  # (D, F); None: not gated


@overridable(composite=True)
def feed_forward(
    x: Array,
    params: FeedForwardParams,
    *,
    activation: str = "relu",
    dropout_rate: float = 0.0,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[Array, FeedForwardCache]:
    """y = dropout(act(x w_up + b_up)) w_down + b_down (arXiv:1706.03762, eq. 2).

    With a gate: y = dropout(act(x w_gate + b_gate) * (x w_up + b_up)) w_down + b_down
    (arXiv:2002.05202; SwiGLU with "silu", GEGLU with "gelu"). Without params.down, y are the hidden
    units: y = dropout(act(x w_up + b_up)).

    x, y: (..., D)
    activation: a name in `ops.activation.ACTIVATIONS`
    dropout_key: None: no dropout
    ValueError for another activation and for shapes that do not fit.
    """
    require_activation("feed_forward", activation)
    up: Any
    if params.gate is None:
        hidden, up = linear(x, params.up)  # (..., F)
        hidden, act = ACTIVATIONS[activation](hidden)
    else:
        (hidden, opened), up = linear_many(x, (params.up, params.gate), all_kept=True)
        hidden, act = ops.glu(opened, hidden, activation=activation)
    hidden, drop = ops.dropout(hidden, rate=dropout_rate, key=dropout_key)
    y, down = (hidden, None) if params.down is None else linear(hidden, params.down)
    return y, FeedForwardCache(up, params.gate is not None, act, drop, down)


@short
class FeedForwardCache(NamedTuple):
    """Saved by `feed_forward` for backward: the caches of its linear layers and ops."""

    up: Any  # of the first linear layer; with a gate, of `linear_many` for up and gate
    gated: bool
    act: Any  # of the activation, or of `ops.glu`
    drop: Any  # of `ops.dropout`
    down: Any  # of the second linear layer; None without one

    def backward(self, dy: Array) -> tuple[Array, FeedForwardParams]:
        """Gradients of x and params."""
        dhidden, ddown = (dy, None) if self.down is None else self.down.backward(dy)
        dhidden = self.act.backward(self.drop.backward(dhidden))
        if not self.gated:
            dx, dup = self.up.backward(dhidden)
            return dx, FeedForwardParams(dup, ddown)
        dopened, dhidden = dhidden
        dx, (dup, dgate) = self.up.backward(dhidden, dopened)
        return dx, FeedForwardParams(dup, ddown, dgate)


def chunked_feed_forward(
    x: Array, params: FeedForwardParams, *, chunk_len: int, activation: str = "relu"
) -> tuple[Array, ChunkedCache]:
    """y = `feed_forward` of x, for `chunk_len` tokens at a time (arXiv:2001.04451, section 3).

    The hidden units (..., chunk_len, F) of one chunk are in memory, instead of (..., T, F). Only x
    and params are saved: backward computes the hidden units of each chunk again.

    x, y: (..., T, D)
    chunk_len: tokens of a chunk; the last chunk may have fewer
    activation: a name in `ops.activation.ACTIVATIONS`
    ValueError for a chunk_len below 1, an unknown activation and shapes that do not fit.
    """
    require_sizes("feed_forward", 1, chunk_len=chunk_len)
    xp = array_namespace(x)
    parts = [
        feed_forward(x[..., chunk, :], params, activation=activation)[0]
        for chunk in _chunks(x, chunk_len)
    ]
    cache = ChunkedCache(x, params, chunk_len, activation, current_contexts())
    return xp.concat(parts, axis=-2), saved(cache)


@short
class ChunkedCache(NamedTuple):
    """Saved by `chunked_feed_forward` for backward: its arguments."""

    x: Array  # (..., T, D)
    params: FeedForwardParams
    chunk_len: int
    activation: str
    contexts: tuple[Any, ...]  # of the forward

    def backward(self, dy: Array) -> tuple[Array, FeedForwardParams]:
        """Gradients of x and params. The gradient of params is the sum over the chunks."""
        x, chunk_len = self.x, self.chunk_len
        require_gradient("feed_forward", "dy", dy, x)
        parts: list[Array] = []
        dparams: Any = None
        for chunk in _chunks(x, chunk_len):
            dpart = dy[..., chunk, :]
            part, _, _ = barrier(x[..., chunk, :], memory=None, key=None, dy=dpart)
            dx, more = self.again(part).backward(dpart)  # frees the cache before the next chunk
            parts.append(dx)
            dparams = plus(dparams, more)
        return array_namespace(dy).concat(parts, axis=-2), dparams

    def again(self, part: Array) -> Any:
        """The cache of the network on one chunk, from a second forward."""
        with again(self.contexts):
            return feed_forward(part, self.params, activation=self.activation)[1]


def _chunks(x: Array, chunk_len: int) -> Iterator[slice]:
    """The slices of the tokens; one empty slice if there are none."""
    n = x.shape[-2]
    return (slice(start, min(start + chunk_len, n)) for start in range(0, max(n, 1), chunk_len))
