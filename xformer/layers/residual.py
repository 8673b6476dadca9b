"""A sublayer with its residual connection, its norm and its dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from xformer import ops
from xformer.layers.norm import LayerNormParams
from xformer.typing import Array

Sublayer = Callable[[Array], tuple[Array, Any]]


def residual(
    x: Array,
    norm: LayerNormParams | None,
    sublayer: Sublayer,
    *,
    place: str = "pre",
    eps: float = 1e-5,
    dropout_rate: float = 0.0,
    dropout_key: ops.Key | None = None,
) -> tuple[Array, ResidualCache]:
    """place="pre": y = x + f(norm(x)). place="post": y = norm(x + f(x)). (arXiv:2002.04745)

    Dropout applies to the output of f; norm None leaves the norm out. x, y: (..., D).
    `sublayer(x)` returns (y, cache); what its backward returns after dx is handed on.
    """
    if place not in ("pre", "post"):
        raise ValueError(f'residual: place must be "pre" or "post", got {place!r}')
    norm_cache = None
    inner = x
    if norm is not None and place == "pre":
        inner, norm_cache = ops.layer_norm(x, *norm, eps=eps)
    branch, sub_cache = sublayer(inner)
    branch, drop_cache = ops.dropout(branch, rate=dropout_rate, key=dropout_key)
    y = x + branch
    if norm is not None and place == "post":
        y, norm_cache = ops.layer_norm(y, *norm, eps=eps)
    return y, ResidualCache(norm_cache, sub_cache, drop_cache, place)


class ResidualCache(NamedTuple):
    """What `residual` keeps for its backward."""

    norm: Any
    sublayer: Any
    drop: Any
    place: str

    def backward(self, dy: Array) -> tuple[Any, ...]:
        """Gradients of x and norm, then whatever the sublayer returns after its dx."""
        dnorm: Any = None
        if self.norm is not None and self.place == "post":
            dy, *dnorm = self.norm.backward(dy)
        dbranch, *rest = self.sublayer.backward(self.drop.backward(dy))
        if self.norm is not None and self.place == "pre":
            dbranch, *dnorm = self.norm.backward(dbranch)
        dnorm = None if dnorm is None else LayerNormParams(*dnorm)
        return dy + dbranch, dnorm, *rest
