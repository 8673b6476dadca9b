"""The head of a language model, and functions that all heads share (see `heads`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from xformer import ops
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import number, plain_numbers, require_cap
from xformer.initializers import Draw, normal
from xformer.layers.embed import EmbedConfig
from xformer.layers.linear import LinearParams, linear
from xformer.models.loss import cross_entropy_of, linear_loss

Top = Callable[[Array, Any], tuple[Array, Any]]  # (x, LinearParams) -> (y, cache)


@dataclass(frozen=True)
class LMHead:
    """logits = softcap(scale * x w + b). tied: w is the transposed table of the embedding."""

    tied: bool = True
    bias: bool = False  # a tied head has none
    scale: float = 1.0  # T5, if tied: d_model^-1/2
    softcap: float | None = None  # Gemma 2: 30
    of_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        plain_numbers(self)
        if self.tied and self.bias:
            raise ValueError("LMHead: a tied head has no bias")
        number("LMHead", "scale", self.scale)
        if self.softcap is not None:
            require_cap("LMHead", self.softcap)

    def init(
        self, rng: Generator, width: int, embed: EmbedConfig | None, *, draw: Draw = normal
    ) -> LinearParams | None:
        """Initial parameters; None if the head is tied."""
        if self.tied:
            return None
        embed = with_vocabulary("LMHead", embed)
        return LinearParams.init(rng, (width, embed.vocab_size), draw=draw, bias=self.bias)

    def forward(
        self, x: Array, params: LinearParams | None, table: Array, **_: Any
    ) -> tuple[Array, LMHeadCache]:
        """Logits (B, T, V). x: (B, T, D)   table: (V, D)."""
        logits, cache = self._topped(linear, x, params, table)
        if self.softcap is None:
            return logits, cache
        logits, cap = ops.softcap(logits, cap=self.softcap)
        return logits, cache._replace(cap=cap)

    def loss(
        self,
        x: Array,
        params: LinearParams | None,
        table: Array,
        *,
        targets: Array,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, Any]:
        """(loss, cache): the cross-entropy of the logits of x (B, T, D) and targets (B, T).

        options: keyword arguments of `ops.cross_entropy`
        mask, dropout_key: not used; other heads use them
        """
        if self.softcap is not None:
            return cross_entropy_of(*self.forward(x, params, table), targets, options)
        return self._topped(partial(linear_loss, targets, options), x, params, table)

    def _topped(
        self, top: Top, x: Array, params: LinearParams | None, table: Array
    ) -> tuple[Array, LMHeadCache]:
        """top(scale * x, LinearParams(w, b)), with its cache."""
        require_present("LMHead", "params.head", params, not self.tied)
        weights = LinearParams(transposed(table), None) if params is None else params
        y, cache = top(x if self.scale == 1.0 else x * self.scale, weights)
        return y, LMHeadCache(cache, None, self.tied, self.scale)


@short
class LMHeadCache(NamedTuple):
    """Saved by `LMHead.forward` and `loss` for backward. For a loss, dy is dloss."""

    top: Any
    cap: Any
    tied: bool
    scale: float

    def backward(self, dy: Array) -> tuple[Array, LinearParams | None, Array | None]:
        """Gradients of x, params and table. A tied head has None for params, others for table."""
        if self.cap is not None:
            dy = self.cap.backward(dy)
        dx, dparams = self.top.backward(dy)
        dx = dx if self.scale == 1.0 else dx * self.scale
        return (dx, None, transposed(dparams.w)) if self.tied else (dx, dparams, None)


def logits_of(
    op: str, head: Any, x: Array, params: Any, table: Array | None, **options: Any
) -> tuple[Array, Any]:
    """`head.forward`; without a head the hidden states x, unchanged, and None."""
    if head is None:
        require_present(op, "params.head", params, False)
        return x, None
    y, cache = head.forward(x, params, table, **options)
    return y, cache


def transposed(table: Any) -> Any:
    """The transpose of a table or of its gradient. Frozen stays frozen, and None stays None."""
    return tree.map(lambda a: a.T, table)


def zeros_of(params: Any) -> Any:
    """Zeros, the gradient of unused parameters; None for frozen ones."""
    return tree.map(lambda a: array_namespace(a).zeros_like(a), tree.trained(params))


def require_present(model: str, name: str, params: Any, wanted: bool) -> None:
    """ValueError if `params` is None although `wanted`, or the other way round."""
    if (params is not None) != wanted:
        got = "None" if params is None else "parameters"
        raise ValueError(
            f"{model}: {name} must be {'parameters' if wanted else 'None'} by config, got {got}"
        )


def with_vocabulary(model: str, embed: EmbedConfig | None) -> EmbedConfig:
    """`embed`, unchanged. ValueError if it is None."""
    if embed is None:
        raise ValueError(f"{model}: the size of a vocabulary needs an embedding, got None")
    return embed
