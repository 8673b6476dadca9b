"""Sublayers with residual connections, norms and dropout: in sequence, or two in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xformer import ops
from xformer.base.choices import require_one_of
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.layers.norm import AddNormCache, NormConfig, NormParams, add_norm, norm

Sublayer = Callable[[Array], tuple[Array, Any]]
Terms = tuple[Array, Array | None]  # of a sum that is computed later; None: there is one term


class Branch(NamedTuple):
    """A sublayer with its norms, scale and dropout. What is None is left out."""

    sublayer: Sublayer
    norm: NormParams | None  # before the sublayer, or after the sum with its output
    out_norm: NormParams | None = None  # of the sublayer's output
    scale: Array | None = None  # (1,), which multiplies the output
    dropout_key: ops.RandomKey | None = None


def residual(
    x: Array,
    norm_params: NormParams | None,
    sublayer: Sublayer,
    out_norm: NormParams | None = None,
    scale: Array | None = None,
    *,
    norm_placement: str = "pre",
    config: NormConfig | None = None,
    multiplier: float = 1.0,
    dropout_rate: float = 0.0,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[Array, ResidualCache]:
    """y = x + f(norm(x)) ("pre"), or y = norm(x + f(x)) ("post"; arXiv:2002.04745).

    x, y: (..., D)
    norm_params: None: no norm
    sublayer: f, a function that returns (f(x), cache)
    out_norm: a norm of f's output, before dropout; None: no norm. With "pre" it is the sandwich
        norm of Gemma 2 (arXiv:2408.00118), without norm_params the output norm of OLMo 2
        (arXiv:2501.00656).
    scale: (1,), a number that multiplies what is added to x, after out_norm (`ops.scale`; ReZero);
        None: no number
    norm_placement: "pre" or "post"
    config: of both norms; None: LayerNorm
    multiplier: a fixed number that multiplies what is added to x (Granite)
    dropout_key: None: no dropout
    ValueError for another norm_placement, and for shapes that do not fit.
    """
    branch = Branch(sublayer, norm_params, out_norm, scale, dropout_key)
    options: Any = {"config": config, "multiplier": multiplier, "dropout_rate": dropout_rate}
    terms, cache = residuals(x, (branch,), norm_placement=norm_placement, **options)
    return summed(*terms), ResidualCache(cache)


@short
class ResidualCache(NamedTuple):
    """Saved by `residual` for backward: the cache of `residuals` with one branch."""

    chain: ResidualsCache

    def backward(self, dy: Array, *dextra: Any) -> tuple[Any, ...]:
        """Gradients of x, norm_params, out_norm, scale, then what f's backward returns after dx.

        The gradient of an argument that was None is None.

        dy: (..., D), the gradient of y
        dextra: further arguments of f's backward, after the gradient of f's output
        """
        dx, (grads,) = self.chain.backward(dy, *dextra)
        return dx, *grads


def residuals(
    x: Array,
    branches: Sequence[Branch],
    r: Array | None = None,
    *,
    norm_placement: str = "pre",
    config: NormConfig | None = None,
    multiplier: float = 1.0,
    dropout_rate: float = 0.0,
) -> tuple[Terms, ResidualsCache]:
    """`residual` of each branch in sequence, on x + r, with the result as two terms.

    With "pre", the next norm computes the last sum in the same op. None is 0.

    x, r: (..., D)
    norm_placement, config, multiplier, dropout_rate: of `residual`
    ValueError for another norm_placement, and for shapes that do not fit.
    """
    require_one_of("residual: norm_placement", norm_placement, ("pre", "post"))
    config = NormConfig() if config is None else config
    post = norm_placement == "post"
    caches: list[BranchCache] = []
    if post:
        x, r = summed(x, r), None
    for branch in branches:
        if post:
            r, cache = _branch(x, branch, config, multiplier, dropout_rate)
            (s, x), sum_cache = _sum_and_norm(x, r, branch.norm, config)
            del s, r  # frees them before the next sublayer runs
        else:
            if r is None and branch.norm is not None:  # the first norm: there is nothing to add
                inner, norm_cache = norm(x, branch.norm, config=config)
                sum_cache = AddNormCache(norm_cache, has_r=False)
            else:
                (x, inner), sum_cache = _sum_and_norm(x, r, branch.norm, config)
            del r
            r, cache = _branch(inner, branch, config, multiplier, dropout_rate)
        caches.append(cache._replace(sum=sum_cache))
    return (x, None if post else r), ResidualsCache(tuple(caches), post)


def summed(x: Array, r: Array | None) -> Array:
    """x + r; x if r is None."""
    return x if r is None else x + r


def _sum_and_norm(
    x: Array, r: Array | None, norm_params: NormParams | None, config: NormConfig
) -> tuple[tuple[Array, Array], Any]:
    """x + r and its norm; x + r twice if norm_params is None."""
    if norm_params is not None:
        return add_norm(x, r, norm_params, config=config)
    s = summed(x, r)
    return (s, s), None


def branched(
    x: Array,
    branch: Branch,
    *,
    config: NormConfig,
    multiplier: float = 1.0,
    dropout_rate: float = 0.0,
) -> tuple[Array, BranchCache]:
    """What a branch of "pre" adds to a stream: r = dropout(m * scale * out_norm(f(norm(x)))).

    x, r: (..., D)
    config, multiplier (m), dropout_rate: of `residual`
    ValueError for shapes that do not fit.
    """
    (_, inner), norm_cache = _sum_and_norm(x, None, branch.norm, config)
    r, cache = _branch(inner, branch, config, multiplier, dropout_rate)
    return r, cache._replace(sum=norm_cache)


def _branch(
    inner: Array, branch: Branch, config: NormConfig, multiplier: float, dropout_rate: float
) -> tuple[Array, BranchCache]:
    """dropout(multiplier * scale * out_norm(sublayer(inner))), which is added to x."""
    r, sub_cache = branch.sublayer(inner)
    out_cache = None
    if branch.out_norm is not None:
        r, out_cache = norm(r, branch.out_norm, config=config)
    r, scale_cache = _scaled(r, branch.scale)
    r = r if multiplier == 1.0 else r * multiplier
    r, drop_cache = ops.dropout(r, rate=dropout_rate, key=branch.dropout_key)
    return r, BranchCache(None, sub_cache, out_cache, scale_cache, multiplier, drop_cache)


def _scaled(r: Array, scale: Array | None) -> tuple[Array, ScaledCache | None]:
    """scale * r; r if scale is None."""
    if scale is None:
        return r, None
    y, cache = ops.scale(r, value(scale))
    return y, ScaledCache(cache, isinstance(scale, Frozen))


@short
class ScaledCache(NamedTuple):
    """Saved for the backward of a scale: the cache of the op, and whether the scale is frozen."""

    op: Any  # of `ops.scale`
    frozen: bool

    def backward(self, dy: Array) -> tuple[Array, Array | None]:
        """Gradients of r and scale; None for a frozen one."""
        dr, dscale = self.op.backward(dy)
        return dr, None if self.frozen else dscale


@short
class BranchCache(NamedTuple):
    """Saved by `residuals` for backward: one branch, and the sum before it (after it, "post").

    `branched` saves the same. Its sum has one term.
    """

    sum: Any  # of `add_norm`; None if the sum has no norm. Of g in `parallel`: of its norm
    sublayer: Any
    out_norm: Any
    scale: ScaledCache | None
    multiplier: float
    drop: Any

    def backward(self, dr: Array) -> tuple[Any, ...]:
        """Gradients of x, norm, out_norm and scale of `branched`, then the sublayer's after dx."""
        dnorm = None
        dx, *rest = _through_branch(self, dr, ())
        if self.sum is not None:
            dx, _, dnorm = self.sum.backward(None, dx)
        return dx, dnorm, *rest


@short
class ResidualsCache(NamedTuple):
    """Saved by `residuals` for backward: the cache of each branch and its sum."""

    branches: tuple[BranchCache, ...]
    post: bool  # norm(x + f(x)), not x + f(norm(x))

    def backward(self, dy: Array, *dextra: Any) -> tuple[Array, list[tuple[Any, ...]]]:
        """The gradient of x + r, and a tuple for each branch.

        The tuple has the gradients of norm, out_norm and scale, then those that the sublayer's
        backward returns after dx.

        dy: of the sum of both terms
        dextra: arguments of the last sublayer's backward after dy
        """
        ds, grads = dy, list[tuple[Any, ...]]()  # from the last branch to the first
        for branch in reversed(self.branches):
            dnorm = None
            if self.post and branch.sum is not None:
                ds, _, dnorm = branch.sum.backward(None, ds)
            dinner, *rest = _through_branch(branch, ds, dextra)
            if self.post or branch.sum is None:
                ds = ds + dinner
            else:
                ds, _, dnorm = branch.sum.backward(ds, dinner)
            del dinner  # frees it before the next sublayer's backward runs
            grads.append((dnorm, *rest))
            dextra = ()
        return ds, grads[::-1]


def _through_branch(cache: BranchCache, dr: Array, dextra: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of the sublayer's input, out_norm and scale, then the sublayer's others."""
    dr, dout_norm, dscale = cache.drop.backward(dr), None, None
    dr = dr if cache.multiplier == 1.0 else dr * cache.multiplier
    if cache.scale is not None:
        dr, dscale = cache.scale.backward(dr)
    if cache.out_norm is not None:
        dr, dout_norm = cache.out_norm.backward(dr)
    dinner, *rest = cache.sublayer.backward(dr, *dextra)
    return dinner, dout_norm, dscale, *rest


def parallel(
    x: Array,
    branches: Sequence[Branch],
    r: Array | None = None,
    *,
    config: NormConfig | None = None,
    multiplier: float = 1.0,
    dropout_rate: float = 0.0,
) -> tuple[Terms, ParallelCache]:
    """z + f(norm(z)) + g(norm'(z)), z = x + r, as two terms (GPT-NeoX, arXiv:2204.06745, eq. 1).

    x, r: (..., D)
    branches: f and g, without out_norm. Without a norm of its own, g reads norm(z) (GPT-J).
    config, multiplier, dropout_rate: of `residual`
    ValueError for shapes that do not fit.
    """
    first, second = branches
    config = NormConfig() if config is None else config
    (x, inner), norm_cache = _sum_and_norm(x, r, first.norm, config)
    other, second_norm_cache = inner, None
    if second.norm is not None:
        other, second_norm_cache = norm(x, second.norm, config=config)
    f, f_cache = _branch(inner, first, config, multiplier, dropout_rate)
    g, g_cache = _branch(other, second, config, multiplier, dropout_rate)
    caches = f_cache._replace(sum=norm_cache), g_cache._replace(sum=second_norm_cache)
    return (x + f, g), ParallelCache(caches)


@short
class ParallelCache(NamedTuple):
    """Saved by `parallel` for backward: the caches of f and g, with their norms."""

    branches: tuple[BranchCache, BranchCache]

    @property
    def post(self) -> bool:
        """Whether a norm follows a sum: never."""
        return False

    def backward(self, dy: Array, *dextra: Any) -> tuple[Array, list[tuple[Any, ...]]]:
        """The gradient of x + r, and a tuple for each branch, as from `ResidualsCache.backward`.

        dextra: arguments of g's backward after dy.
        """
        f, g = self.branches
        dinner, *first = _through_branch(f, dy, ())
        dother, *second = _through_branch(g, dy, dextra)
        dnorm = dsecond_norm = None
        if g.sum is None:
            dinner, ds = dinner + dother, dy
        else:
            dother, dsecond_norm = g.sum.backward(dother)
            ds = dy + dother
        if f.sum is None:
            dx = ds + dinner
        else:
            dx, _, dnorm = f.sum.backward(ds, dinner)
        return dx, [(dnorm, *first), (dsecond_norm, *second)]
