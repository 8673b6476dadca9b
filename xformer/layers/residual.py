"""Sublayers with residual connections, norms and dropout: in a row, or two side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xformer import ops
from xformer.layers.norm import NormConfig, NormParams, add_norm, norm
from xformer.typing import Array

Sublayer = Callable[[Array], tuple[Array, Any]]


class Branch(NamedTuple):
    """A sublayer with its own norms and dropout; a norm that is None is left out."""

    sublayer: Sublayer
    norm: NormParams | None  # before it, or behind its sum
    out_norm: NormParams | None = None  # of its output
    dropout_key: ops.Key | None = None


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
    branch = Branch(sublayer, norm_params, out_norm, dropout_key)
    y, cache = residuals(x, (branch,), place=place, config=config, dropout_rate=dropout_rate)
    return y, ResidualCache(cache)


class ResidualCache(NamedTuple):
    """What `residual` keeps for its backward."""

    chain: ResidualsCache

    def backward(self, dy: Array, *dextra: Any) -> tuple[Any, ...]:
        """Gradients of x, norm_params, out_norm, then what the sublayer returns after its dx.

        dextra goes to the sublayer's backward, after its dy.
        """
        dx, (own,) = self.chain.backward(dy, *dextra)
        return dx, *own


def residuals(
    x: Array,
    branches: Sequence[Branch],
    *,
    place: str = "pre",
    config: NormConfig | None = None,
    dropout_rate: float = 0.0,
) -> tuple[Array, ResidualsCache]:
    """`residual` of each branch, one after the other; a sum is one op with the norm behind it."""
    if place not in ("pre", "post"):
        raise ValueError(f'residual: place must be "pre" or "post", got {place!r}')
    config = NormConfig() if config is None else config
    norms = [branch.norm for branch in branches]
    norms = [*norms, None] if place == "pre" else [None, *norms]  # from the 2nd on behind sums
    inner, first = x, None
    if norms[0] is not None:
        inner, first = norm(x, norms[0], config=config)
    caches = []
    for branch, following in zip(branches, norms[1:], strict=True):
        x, inner, cache = _added(x, inner, branch, following, config, dropout_rate)
        x = inner if place == "post" else x
        caches.append(cache)
    return x, ResidualsCache(first, tuple(caches), place == "post")


def _added(
    x: Array,
    inner: Array,
    branch: Branch,
    following: NormParams | None,
    config: NormConfig,
    dropout_rate: float,
) -> tuple[Array, Array, BranchCache]:
    """The sum of x and the branch of `inner`; the norm of the sum, or the sum again."""
    r, sub_cache = branch.sublayer(inner)
    out_cache = sum_cache = None
    if branch.out_norm is not None:
        r, out_cache = norm(r, branch.out_norm, config=config)
    r, drop_cache = ops.dropout(r, rate=dropout_rate, key=branch.dropout_key)
    if following is None:
        s = y = x + r
    else:
        (s, y), sum_cache = add_norm(x, r, following, config=config)
    return s, y, BranchCache(sub_cache, out_cache, drop_cache, sum_cache)


class BranchCache(NamedTuple):
    """What `residuals` keeps of a branch, and of its sum."""

    sublayer: Any
    out_norm: Any
    drop: Any
    sum: Any  # of `add_norm`, where a norm follows


class ResidualsCache(NamedTuple):
    """What `residuals` keeps for its backward."""

    norm: Any  # of the norm before the first sublayer
    branches: tuple[BranchCache, ...]
    post: bool  # norm(x + f(x)), not x + f(norm(x))

    def backward(self, dy: Array, *dextra: Any) -> tuple[Array, list[tuple[Any, ...]]]:
        """Gradient of x; for each branch those of norm, out_norm, and what its sublayer returns.

        dextra goes to the last sublayer's backward, after its dy.
        """
        ds, dinner = dy, None  # of a sum, and of what the next sublayer reads: its norm, or itself
        dnorms: list[Any] = []  # from the last to the first, as the next
        own: list[tuple[Any, ...]] = []
        for branch in reversed(self.branches):
            ds, dnorm = self._through_sum(branch.sum, ds, dinner)
            dnorms.append(dnorm)
            del dinner  # or it would be held while the sublayer's backward runs
            dinner, *rest = _through_branch(branch, ds, dextra)
            own.append(tuple(rest))
            dextra = ()
        dx, dnorm = self._through_norm(ds, dinner)
        dnorms = dnorms if self.post else [*dnorms[1:], dnorm]
        each = zip(reversed(dnorms), reversed(own), strict=True)
        return dx, [(dnorm, *rest) for dnorm, rest in each]

    def _through_sum(self, cache: Any, ds: Array, dinner: Array | None) -> tuple[Array, Any]:
        """Gradients of both terms of a sum, which are one, and of the norm behind it."""
        if cache is not None and not self.post:
            ds, _, dnorm = cache.backward(ds, dinner)
            return ds, dnorm
        ds = ds if dinner is None else ds + dinner
        if cache is None:
            return ds, None
        ds, _, dnorm = cache.backward(None, ds)
        return ds, dnorm

    def _through_norm(self, ds: Array, dinner: Array) -> tuple[Array, Any]:
        """Gradients of x and of the norm before the first sublayer."""
        if self.norm is None:
            return ds + dinner, None
        dx, dnorm = self.norm.backward(dinner)
        return ds + dx, dnorm


def _through_branch(cache: BranchCache, dr: Array, dextra: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of what the sublayer read and of out_norm, then what else its backward returns."""
    dr, dout_norm = cache.drop.backward(dr), None
    if cache.out_norm is not None:
        dr, dout_norm = cache.out_norm.backward(dr)
    dinner, *rest = cache.sublayer.backward(dr, *dextra)
    return dinner, dout_norm, *rest


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
