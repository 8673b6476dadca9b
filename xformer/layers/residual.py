"""A sublayer with its residual connection, its norms and its dropout; or two side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from xformer import ops
from xformer.layers.norm import NormConfig, NormParams, norm
from xformer.typing import Array

Sublayer = Callable[[Array], tuple[Array, Any]]


def residual(
    x: Array,
    norm_params: NormParams | None,
    sublayer: Sublayer,
    out_norm: NormParams | None = None,
    *,
    place: str = "pre",
    config: NormConfig | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ops.Key | None = None,
) -> tuple[Array, ResidualCache]:
    """place="pre": y = x + f(norm(x)). place="post": y = norm(x + f(x)). (arXiv:2002.04745)

    out_norm normalises the output of f: with "pre" the sandwich of Gemma 2 (arXiv:2408.00118), or,
    norm_params None, the output norm of OLMo 2 (arXiv:2501.00656). Dropout comes after it. A norm
    that is None is left out. x, y: (..., D). `sublayer(x)` returns (y, cache); what its backward
    returns after dx is handed on. config: LayerNorm unless given.
    """
    if place not in ("pre", "post"):
        raise ValueError(f'residual: place must be "pre" or "post", got {place!r}')
    config = NormConfig() if config is None else config
    norm_cache = out_cache = None
    inner = x
    if norm_params is not None and place == "pre":
        inner, norm_cache = norm(x, norm_params, config=config)
    branch, sub_cache = sublayer(inner)
    if out_norm is not None:
        branch, out_cache = norm(branch, out_norm, config=config)
    branch, drop_cache = ops.dropout(branch, rate=dropout_rate, key=dropout_key)
    y = x + branch
    if norm_params is not None and place == "post":
        y, norm_cache = norm(y, norm_params, config=config)
    return y, ResidualCache(norm_cache, sub_cache, out_cache, drop_cache, place)


class ResidualCache(NamedTuple):
    """What `residual` keeps for its backward."""

    norm: Any
    sublayer: Any
    out_norm: Any
    drop: Any
    place: str

    def backward(self, dy: Array, *dextra: Any) -> tuple[Any, ...]:
        """Gradients of x, norm_params, out_norm, then what the sublayer returns after its dx.

        dextra goes to the sublayer's backward, after its dy.
        """
        dnorm: Any = None
        dout_norm = None
        if self.norm is not None and self.place == "post":
            dy, dnorm = self.norm.backward(dy)
        dbranch = self.drop.backward(dy)
        if self.out_norm is not None:
            dbranch, dout_norm = self.out_norm.backward(dbranch)
        dbranch, *rest = self.sublayer.backward(dbranch, *dextra)
        if self.norm is not None and self.place == "pre":
            dbranch, dnorm = self.norm.backward(dbranch)
        return dy + dbranch, dnorm, dout_norm, *rest


def parallel(
    x: Array,
    norm_params: NormParams,
    first: Sublayer,
    second: Sublayer,
    second_norm: NormParams | None = None,
    *,
    config: NormConfig | None = None,
    dropout_rate: float = 0.0,
    dropout_keys: tuple[ops.Key | None, ops.Key | None] = (None, None),
) -> tuple[Array, ParallelCache]:
    """y = x + f(norm(x)) + g(norm'(x)) (GPT-NeoX, arXiv:2204.06745, eq. 1).

    second_norm None: g sees norm(x) too (GPT-J). x, y: (..., D); f, g as in `residual`.
    """
    config = NormConfig() if config is None else config
    inner, norm_cache = norm(x, norm_params, config=config)
    other, second_norm_cache = inner, None
    if second_norm is not None:
        other, second_norm_cache = norm(x, second_norm, config=config)
    f, first_cache = first(inner)
    g, second_cache = second(other)
    f, first_drop = ops.dropout(f, rate=dropout_rate, key=dropout_keys[0])
    g, second_drop = ops.dropout(g, rate=dropout_rate, key=dropout_keys[1])
    cache = ParallelCache(
        norm_cache, second_norm_cache, first_cache, second_cache, first_drop, second_drop
    )
    return x + f + g, cache


class ParallelCache(NamedTuple):
    """What `parallel` keeps for its backward."""

    norm: Any
    second_norm: Any
    first: Any
    second: Any
    first_drop: Any
    second_drop: Any

    def backward(self, dy: Array, *dextra: Any) -> tuple[Any, ...]:
        """Gradients of x and both norms, then what f's and g's backward return after their dx.

        The last two are a tuple each; dextra goes to g's backward, after its dy.
        """
        dinner, *dfirst = self.first.backward(self.first_drop.backward(dy))
        dother, *dsecond = self.second.backward(self.second_drop.backward(dy), *dextra)
        dsecond_norm = None
        if self.second_norm is None:
            dinner = dinner + dother
            dx = dy
        else:
            dother, dsecond_norm = self.second_norm.backward(dother)
            dx = dy + dother
        dinner, dnorm = self.norm.backward(dinner)
        return dx + dinner, dnorm, dsecond_norm, tuple(dfirst), tuple(dsecond)
