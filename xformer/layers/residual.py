"""Sublayers with residual connections, norms and dropout: in a row, or two side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xformer import ops
from xformer.layers.norm import NormConfig, NormParams, add_norm, norm
from xformer.showing import short
from xformer.typing import Array

Sublayer = Callable[[Array], tuple[Array, Any]]
Terms = tuple[Array, Array | None]  # of a sum that is not made yet; None: there is one term


class Branch(NamedTuple):
    """A sublayer with its own norms and dropout; a norm that is None is left out."""

    sublayer: Sublayer
    norm: NormParams | None  # before it, or behind its sum
    out_norm: NormParams | None = None  # of its output
    dropout_key: ops.RandomKey | None = None


def residual(
    x: Array,
    norm_params: NormParams | None,
    sublayer: Sublayer,
    out_norm: NormParams | None = None,
    *,
    place: str = "pre",
    config: NormConfig | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[Array, ResidualCache]:
    """place="pre": y = x + f(norm(x)). place="post": y = norm(x + f(x)). (arXiv:2002.04745)

    out_norm normalises the output of f: with "pre" the sandwich of Gemma 2 (arXiv:2408.00118), or,
    norm_params None, the output norm of OLMo 2 (arXiv:2501.00656). Dropout comes after it. A norm
    that is None is left out. x, y: (..., D). `sublayer(x)` returns (y, cache); what its backward
    returns after dx is handed on. config: LayerNorm unless given.
    """
    branch = Branch(sublayer, norm_params, out_norm, dropout_key)
    terms, cache = residuals(x, (branch,), place=place, config=config, dropout_rate=dropout_rate)
    return summed(*terms), ResidualCache(cache)


@short
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
    r: Array | None = None,
    *,
    place: str = "pre",
    config: NormConfig | None = None,
    dropout_rate: float = 0.0,
) -> tuple[Terms, ResidualsCache]:
    """`residual` of each branch, one after the other, of x + r (of x where r is None).

    The result is x and r of the next such chain: with "pre" the last sum is left to the norm that
    follows there, with which it is one op.
    """
    if place not in ("pre", "post"):
        raise ValueError(f'residual: place must be "pre" or "post", got {place!r}')
    config = NormConfig() if config is None else config
    post = place == "post"
    caches: list[BranchCache] = []
    if post:
        x, r = summed(x, r), None
    for branch in branches:
        if post:
            r, cache = _branch(x, branch, config, dropout_rate)
            (s, x), sum_cache = _sum_and_norm(x, r, branch.norm, config)
            del s, r  # or they would be held while the next sublayer runs
        else:
            (x, inner), sum_cache = _sum_and_norm(x, r, branch.norm, config)
            del r
            r, cache = _branch(inner, branch, config, dropout_rate)
        caches.append(cache._replace(sum=sum_cache))
    return (x, None if post else r), ResidualsCache(tuple(caches), post)


def summed(x: Array, r: Array | None) -> Array:
    """x + r, x where r is None."""
    return x if r is None else x + r


def _sum_and_norm(
    x: Array, r: Array | None, norm_params: NormParams | None, config: NormConfig
) -> tuple[tuple[Array, Array], Any]:
    """The sum of both, and its norm: the sum again where norm_params is None."""
    if norm_params is not None:
        return add_norm(x, r, norm_params, config=config)
    s = summed(x, r)
    return (s, s), None


def _branch(
    inner: Array, branch: Branch, config: NormConfig, dropout_rate: float
) -> tuple[Array, BranchCache]:
    """What is added to x."""
    r, sub_cache = branch.sublayer(inner)
    out_cache = None
    if branch.out_norm is not None:
        r, out_cache = norm(r, branch.out_norm, config=config)
    r, drop_cache = ops.dropout(r, rate=dropout_rate, key=branch.dropout_key)
    return r, BranchCache(None, sub_cache, out_cache, drop_cache)


@short
class BranchCache(NamedTuple):
    """What `residuals` keeps of a branch, and of the sum before it, or, "post", behind it."""

    sum: Any  # of `add_norm`, where the sum has a norm
    sublayer: Any
    out_norm: Any
    drop: Any


@short
class ResidualsCache(NamedTuple):
    """What `residuals` keeps for its backward."""

    branches: tuple[BranchCache, ...]
    post: bool  # norm(x + f(x)), not x + f(norm(x))

    def backward(self, dy: Array, *dextra: Any) -> tuple[Array, list[tuple[Any, ...]]]:
        """Gradient of x + r; for each branch of norm, out_norm, and what its sublayer returns.

        dy: of the sum of both results. dextra goes to the last sublayer's backward, after its dy.
        """
        ds, own = dy, list[tuple[Any, ...]]()  # from the last branch to the first
        for branch in reversed(self.branches):
            dnorm = None
            if self.post and branch.sum is not None:
                ds, _, dnorm = branch.sum.backward(None, ds)
            dinner, *rest = _through_branch(branch, ds, dextra)
            if self.post or branch.sum is None:
                ds = ds + dinner
            else:
                ds, _, dnorm = branch.sum.backward(ds, dinner)
            del dinner  # or it would be held while the next sublayer's backward runs
            own.append((dnorm, *rest))
            dextra = ()
        return ds, own[::-1]


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
    dropout_keys: tuple[ops.RandomKey | None, ops.RandomKey | None] = (None, None),
) -> tuple[Array, ParallelCache]:
    """y = x + f(norm(x)) + g(norm'(x)) (GPT-NeoX, arXiv:2204.06745, eq. 1).

    second_norm None: g sees norm(x) too (GPT-J). x, y: (..., D); f, g as in `residual`.
    """
    terms, cache = parallels(
        x,
        norm_params,
        first,
        second,
        second_norm,
        config=config,
        dropout_rate=dropout_rate,
        dropout_keys=dropout_keys,
    )
    return summed(*terms), cache


def parallels(
    x: Array,
    norm_params: NormParams,
    first: Sublayer,
    second: Sublayer,
    second_norm: NormParams | None = None,
    r: Array | None = None,
    *,
    config: NormConfig | None = None,
    dropout_rate: float = 0.0,
    dropout_keys: tuple[ops.RandomKey | None, ops.RandomKey | None] = (None, None),
) -> tuple[Terms, ParallelCache]:
    """`parallel` of x + r, its last sum left to the norm that follows, as in `residuals`."""
    config = NormConfig() if config is None else config
    (x, inner), norm_cache = add_norm(x, r, norm_params, config=config)
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
    return (x + f, g), cache


@short
class ParallelCache(NamedTuple):
    """What `parallel` keeps for its backward."""

    norm: Any  # of `add_norm`
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
            dinner, ds = dinner + dother, dy
        else:
            dother, dsecond_norm = self.second_norm.backward(dother)
            ds = dy + dother
        dx, _, dnorm = self.norm.backward(ds, dinner)
        return dx, dnorm, dsecond_norm, tuple(dfirst), tuple(dsecond)
