"""Heads: from the hidden states of a stack of blocks to logits.

A head is a frozen configuration with these methods and attributes:

- `init(rng, width, embed)` returns its parameters. width: of the hidden states. embed: the
  configuration of the embedding.
- `forward(x, params, table, ...)` returns logits and a cache. table: of the embedding, to which
  the head may be tied. The cache's backward returns the gradients of x, params and table.
- `loss(x, params, table, targets=..., ...)` returns the cross-entropy of the logits, which need not
  all be in memory at once. Its cache's backward takes `dloss`. A head that returns no logits does
  not have it.
- `of_tokens`: whether the logits are over the embedding's vocabulary.

A model without a head (None) returns hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from xformer import ops
from xformer.base.choices import require_one_of
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import number, plain_numbers, require_sizes
from xformer.initializers import Draw, normal
from xformer.layers.embed import EmbedConfig
from xformer.layers.linear import LinearParams, linear
from xformer.layers.norm import NormConfig, NormParams, norm
from xformer.layers.pooling import POOLINGS, pool
from xformer.models.discriminator import Discriminator
from xformer.models.lm_head import (
    LMHead,
    Top,
    require_present,
    transposed,
    with_vocabulary,
    zeros_of,
)
from xformer.models.loss import cross_entropy_of, linear_loss
from xformer.ops.activation import ACTIVATIONS, require_activation


@dataclass(frozen=True)
class MaskedLMHead:
    """logits = norm(act(x w_dense + b_dense)) w + b (BERT). tied: w is the embedding's table^T.

    dense_bias, norm_bias, bias: whether there are b_dense, the bias of the norm, and b
    """

    activation: str = "gelu"
    eps: float = 1e-12
    tied: bool = True
    dense_bias: bool = True
    norm_bias: bool = True
    bias: bool = True
    of_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_activation("MaskedLMHead", self.activation)

    @property
    def norm(self) -> NormConfig:
        """The configuration of the norm."""
        return NormConfig(eps=self.eps, bias=self.norm_bias)

    def init(
        self, rng: Generator, width: int, embed: EmbedConfig | None, *, draw: Draw = normal
    ) -> MaskedLMHeadParams:
        """Initial parameters."""
        embed = with_vocabulary("MaskedLMHead", embed)
        table_width, vocab_size = embed.width, embed.vocab_size
        dense = LinearParams.init(rng, (width, table_width), draw=draw, bias=self.dense_bias)
        w = None if self.tied else draw(rng, (table_width, vocab_size))
        gains = self.norm.init(rng, table_width)
        b = rng.full((vocab_size,), 0.0) if self.bias else None
        return MaskedLMHeadParams(dense, gains, w, b)

    def forward(
        self, x: Array, params: MaskedLMHeadParams, table: Array, **_: Any
    ) -> tuple[Array, MaskedLMHeadCache]:
        """Logits (B, T, V). x: (B, T, D)   table: (V, E)."""
        return self._topped(linear, x, params, table)

    def loss(
        self,
        x: Array,
        params: MaskedLMHeadParams,
        table: Array,
        *,
        targets: Array,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, MaskedLMHeadCache]:
        """The cross-entropy of targets (B, T). options: of `ops.cross_entropy`."""
        return self._topped(partial(linear_loss, targets, options), x, params, table)

    def _topped(
        self, top: Top, x: Array, params: MaskedLMHeadParams, table: Array
    ) -> tuple[Array, MaskedLMHeadCache]:
        """top(norm(act(x w_dense + b_dense)), LinearParams(w, b)), with its cache."""
        require_present("MaskedLMHead", "params.head.w", params.w, not self.tied)
        x, dense = linear(x, params.dense)
        x, act = ACTIVATIONS[self.activation](x)
        x, gains = norm(x, params.norm, config=self.norm)
        w = transposed(table) if params.w is None else params.w
        y, cache = top(x, LinearParams(w, params.b))
        return y, MaskedLMHeadCache(dense, act, gains, cache, self.tied)


@short
class MaskedLMHeadParams(NamedTuple):
    """Parameters of a MaskedLMHead."""

    dense: LinearParams  # (D, E)
    norm: NormParams  # (E,)
    w: Array | None  # (E, V); None: tied to the embedding's table
    b: Array | None  # (V,)


@short
class MaskedLMHeadCache(NamedTuple):
    """Saved by `MaskedLMHead.forward` and `loss` for backward. For a loss, dy is dloss."""

    dense: Any
    act: Any
    norm: Any
    top: Any
    tied: bool

    def backward(self, dy: Array) -> tuple[Array, MaskedLMHeadParams, Array | None]:
        """Gradients of x, params and table; None for the table if the head is not tied."""
        dx, (dw, db) = self.top.backward(dy)
        dx, dnorm = self.norm.backward(dx)
        dx, ddense = self.dense.backward(self.act.backward(dx))
        dhead_w, dtable = (None, transposed(dw)) if self.tied else (dw, None)
        return dx, MaskedLMHeadParams(ddense, dnorm, dhead_w, db), dtable


@dataclass(frozen=True)
class Classifier:
    """Logits of a sequence: act(x w_dense + b_dense) w + b, with x its first or last token.

    token: "first", "last", or "mean", the mean of the tokens. dense: the activation of the dense
    layer; None: no dense layer. dense_bias: whether it has a bias. norm: of act(...) (ModernBERT).
    dense_dropout: before the dense layer (RoBERTa). dropout: before w. ValueError for options that
    do not fit together.
    """

    n_labels: int
    token: str = "first"
    dense: str | None = "tanh"
    bias: bool = True
    dense_dropout: float = 0.0
    dropout: float = 0.0
    dense_bias: bool = True
    norm: NormConfig | None = None
    of_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_sizes("Classifier", 1, n_labels=self.n_labels)
        require_one_of("Classifier: token", self.token, POOLINGS)
        _require_dense("Classifier", self)
        for name in ("dense_dropout", "dropout"):
            number("Classifier", name, getattr(self, name), low=0, high=1)

    def init(
        self, rng: Generator, width: int, embed: EmbedConfig | None, *, draw: Draw = normal
    ) -> ClassifierParams:
        """Initial parameters."""
        dense, gains = _init_dense(self, rng, width, draw)
        out = LinearParams.init(rng, (width, self.n_labels), draw=draw, bias=self.bias)
        return ClassifierParams(dense, out, gains)

    def forward(
        self,
        x: Array,
        params: ClassifierParams,
        table: Array,
        *,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, ClassifierCache]:
        """Logits (B, n_labels). x: (B, T, D)   mask: (B, T), True = a token, False = padding."""
        x, pooled = pool(x, pooling=self.token, mask=mask)  # (B, D)
        before = None
        if self.dense is not None:
            rate = 0.0 if dropout_key is None else self.dense_dropout
            x, before = ops.dropout(x, rate=rate, key=dropout_key)
        x, dense, act, gains = _through_dense("Classifier", self, x, params)
        rate = 0.0 if dropout_key is None else self.dropout
        x, drop = ops.dropout(x, rate=rate, key=dropout_key and dropout_key.at(1))
        logits, out = linear(x, params.out)
        return logits, ClassifierCache(pooled, before, dense, act, gains, drop, out)

    def loss(
        self,
        x: Array,
        params: ClassifierParams,
        table: Array,
        *,
        targets: Array,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, Any]:
        """The cross-entropy of targets (B,). options: of `ops.cross_entropy`."""
        logits, cache = self.forward(x, params, table, mask=mask, dropout_key=dropout_key)
        return cross_entropy_of(logits, cache, targets, options)


@short
class ClassifierParams(NamedTuple):
    """Parameters of a Classifier."""

    dense: LinearParams | None  # (D, D)
    out: LinearParams  # (D, n_labels)
    norm: NormParams | None = None  # (D,)


@short
class ClassifierCache(NamedTuple):
    """Saved by `Classifier.forward` for backward: the cache of each step, in order."""

    pool: Any  # of `layers.pool`
    before: Any  # of dropout before the dense layer; None, like dense and act, without it
    dense: Any  # of `layers.linear`
    act: Any  # of the activation
    norm: Any  # of `layers.norm`; None: no norm
    drop: Any  # of dropout before the last layer
    out: Any  # of `layers.linear`, to the logits

    def backward(self, dlogits: Array) -> tuple[Array, ClassifierParams, None]:
        """Gradients of x and params, and None: the table is not used."""
        dx, dout = self.out.backward(dlogits)
        dx = self.drop.backward(dx)
        dx, ddense, dnorm = _dense_backward(self, dx)
        if self.before is not None:
            dx = self.before.backward(dx)
        return self.pool.backward(dx), ClassifierParams(ddense, dout, dnorm), None


@dataclass(frozen=True)
class TokenClassifier:
    """Logits of each token: x w + b, for named entities and other labels of tokens.

    With a dense layer, norm(act(x w_dense + b_dense)) w + b (ModernBERT); dense, dense_bias, norm:
    of `Classifier`. dropout: before w. ValueError for options that do not fit together.
    """

    n_labels: int
    bias: bool = True
    dropout: float = 0.0
    dense: str | None = None
    dense_bias: bool = True
    norm: NormConfig | None = None
    of_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_sizes("TokenClassifier", 1, n_labels=self.n_labels)
        number("TokenClassifier", "dropout", self.dropout, low=0, high=1)
        _require_dense("TokenClassifier", self)

    def init(
        self, rng: Generator, width: int, embed: EmbedConfig | None, *, draw: Draw = normal
    ) -> TokenClassifierParams:
        """Initial parameters."""
        dense, gains = _init_dense(self, rng, width, draw)
        out = LinearParams.init(rng, (width, self.n_labels), draw=draw, bias=self.bias)
        return TokenClassifierParams(dense, out, gains)

    def forward(
        self,
        x: Array,
        params: TokenClassifierParams,
        table: Array,
        *,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, TokenClassifierCache]:
        """Logits (B, T, n_labels). x: (B, T, D)   mask: not used."""
        return self._topped(linear, x, params, dropout_key)

    def loss(
        self,
        x: Array,
        params: TokenClassifierParams,
        table: Array,
        *,
        targets: Array,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, TokenClassifierCache]:
        """The cross-entropy of targets (B, T). options: of `ops.cross_entropy`.

        mask: not used. Padding needs the targets `ignore_index`.
        """
        return self._topped(partial(linear_loss, targets, options), x, params, dropout_key)

    def _topped(
        self, top: Top, x: Array, params: TokenClassifierParams, dropout_key: ops.RandomKey | None
    ) -> tuple[Array, TokenClassifierCache]:
        """top(dropout(x), params.out), with its cache. x: after the dense layer, if any."""
        x, dense, act, gains = _through_dense("TokenClassifier", self, x, params)
        rate = 0.0 if dropout_key is None else self.dropout
        x, drop = ops.dropout(x, rate=rate, key=dropout_key)
        y, cache = top(x, params.out)
        return y, TokenClassifierCache(dense, act, gains, drop, cache)


@short
class TokenClassifierParams(NamedTuple):
    """Parameters of a TokenClassifier."""

    dense: LinearParams | None  # (D, D)
    out: LinearParams  # (D, n_labels)
    norm: NormParams | None = None  # (D,)


@short
class TokenClassifierCache(NamedTuple):
    """Saved by `TokenClassifier.forward` and `loss` for backward. For a loss, dy is dloss."""

    dense: Any  # of `layers.linear`; None, like act and norm, without it
    act: Any  # of the activation
    norm: Any  # of `layers.norm`
    drop: Any  # of `ops.dropout`
    out: Any  # of `layers.linear`, or of its loss

    def backward(self, dy: Array) -> tuple[Array, TokenClassifierParams, None]:
        """Gradients of x and params, and None: the table is not used."""
        dx, dout = self.out.backward(dy)
        dx, ddense, dnorm = _dense_backward(self, self.drop.backward(dx))
        return dx, TokenClassifierParams(ddense, dout, dnorm), None


def _require_dense(op: str, head: Classifier | TokenClassifier) -> None:
    """ValueError unless the options of the dense layer fit together."""
    if head.dense is not None:
        require_activation(op, head.dense)
    elif head.norm is not None or not head.dense_bias:
        raise ValueError(f"{op}: norm and dense_bias need dense, got None")


def _init_dense(
    head: Classifier | TokenClassifier, rng: Generator, width: int, draw: Draw
) -> tuple[LinearParams | None, NormParams | None]:
    """Initial parameters of the dense layer and its norm, or None."""
    dense = None
    if head.dense is not None:
        dense = LinearParams.init(rng, (width, width), draw=draw, bias=head.dense_bias)
    return dense, None if head.norm is None else head.norm.init(rng, width)


def _through_dense(
    op: str,
    head: Classifier | TokenClassifier,
    x: Array,
    params: ClassifierParams | TokenClassifierParams,
) -> tuple[Array, Any, Any, Any]:
    """norm(act(x w_dense + b_dense)), or x without a dense layer; and the cache of each step."""
    require_present(op, "params.head.dense", params.dense, head.dense is not None)
    require_present(op, "params.head.norm", params.norm, head.norm is not None)
    dense = act = gains = None
    if head.dense is not None and params.dense is not None:
        x, dense = linear(x, params.dense)
        x, act = ACTIVATIONS[head.dense](x)
    if head.norm is not None and params.norm is not None:
        x, gains = norm(x, params.norm, config=head.norm)
    return x, dense, act, gains


def _dense_backward(
    cache: ClassifierCache | TokenClassifierCache, dx: Array
) -> tuple[Array, LinearParams | None, NormParams | None]:
    """Gradients of x and of the parameters of the dense layer and its norm."""
    ddense = dnorm = None
    if cache.norm is not None:
        dx, dnorm = cache.norm.backward(dx)
    if cache.dense is not None:
        dx, ddense = cache.dense.backward(cache.act.backward(dx))
    return dx, ddense, dnorm


@dataclass(frozen=True)
class Pooler:
    """BERT's pooler: tanh(x w + b), with x the hidden state of the first token.

    A model with this head returns hidden states. `LanguageModel.pooled(pooling="pooler")` returns
    the pooled output.
    """

    of_tokens: ClassVar[bool] = False

    def init(
        self, rng: Generator, width: int, embed: EmbedConfig | None, *, draw: Draw = normal
    ) -> LinearParams:
        """Initial parameters."""
        return LinearParams.init(rng, (width, width), draw=draw, bias=True)

    def forward(
        self, x: Array, params: LinearParams, table: Array, **_: Any
    ) -> tuple[Array, PoolerCache]:
        """x (B, T, D), unchanged."""
        return x, PoolerCache(params)

    def pooled(self, x: Array, params: LinearParams) -> tuple[Array, PoolerTanhCache]:
        """x: (B, D), the first tokens   y: (B, D)."""
        y, dense = linear(x, params)
        y, act = ops.tanh(y)
        return y, PoolerTanhCache(dense, act)


@short
class PoolerCache(NamedTuple):
    """Saved by `Pooler.forward` for backward: params, whose gradient is zeros of their shapes."""

    params: LinearParams

    def backward(self, dx: Array) -> tuple[Array, LinearParams, None]:
        """Gradients of x; zeros for params and None for the table, which are not used."""
        return dx, zeros_of(self.params), None


@short
class PoolerTanhCache(NamedTuple):
    """Saved by `Pooler.pooled` for backward: the caches of the linear layer and of tanh."""

    linear: Any  # of `layers.linear`
    act: Any  # of `ops.tanh`

    def backward(self, dy: Array) -> tuple[Array, LinearParams]:
        """Gradients of x and params."""
        dx, dparams = self.linear.backward(self.act.backward(dy))
        return dx, dparams


Head = LMHead | MaskedLMHead | Classifier | TokenClassifier | Discriminator | Pooler
