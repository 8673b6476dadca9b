"""Pooling: one vector for a sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import device

from xformer.base.choices import require_one_of
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import saved
from xformer.dispatch.checks import require_gradient, require_mask, require_sizes, require_vectors
from xformer.dispatch.shapes import STORED, dtype_name

POOLINGS = ("mean", "first", "last", "max", "sum", "mean_sqrt_len", "weighted_mean")


def pool(
    x: Array,
    *,
    pooling: str | tuple[str, ...] = "mean",
    mask: Array | None = None,
    skip: int = 0,
) -> tuple[Array, PoolCache | MaxPoolCache | JoinedPoolCache]:
    """y = sum_t weights_t x_t over the tokens t, or the maximum over the tokens.

    x: (B, T, D)   y: (B, D), or (B, n D) for n names; 0 for a sequence without tokens
    pooling: a name, or a tuple of names, whose results are concatenated:
        "mean"; "sum"; "first" or "last", one token; "max", of each of the D numbers;
        "mean_sqrt_len": the sum divided by sqrt(n) of n tokens;
        "weighted_mean": the weight of the t-th token is t / (1 + ... + n) (arXiv:2202.08904)
    mask: (B, T), True = a token, False = padding; None: no padding
    skip: leave out the first `skip` tokens of each sequence, such as a prompt. For "weighted_mean"
        t still counts them, and the weights still sum to 1.
    ValueError for another pooling and for shapes that do not fit. TypeError for x of two-byte
    numbers.
    """
    names = pooling_names("pool", pooling)
    (skip,) = require_sizes("pool", 0, skip=skip)
    require_vectors("pool", "x", x)
    if dtype_name(x) in STORED:
        raise TypeError(f"pool: x must be float32 or float64, got {dtype_name(x)}")
    if mask is not None:
        require_mask("pool", "mask", mask, x)
        if tuple(mask.shape) != tuple(x.shape[:2]):
            raise ValueError(
                f"pool: mask must be (B, T) = {tuple(x.shape[:2])}, got {tuple(mask.shape)}"
            )
    tokens = _tokens(x, mask)
    pooled = [(_max if name == "max" else _sum)(x, name, tokens, skip) for name in names]
    if len(pooled) == 1:
        return pooled[0]
    y = array_namespace(x).concat([part for part, _ in pooled], axis=-1)
    return y, saved(JoinedPoolCache(tuple(cache for _, cache in pooled)))


def pooling_names(what: str, pooling: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names in `pooling`, one or a tuple. ValueError unless all are in `POOLINGS`."""
    names = (pooling,) if isinstance(pooling, str) else pooling
    if not isinstance(names, tuple) or not names:
        raise ValueError(f"{what}: pooling must be a name or a tuple of names, got {pooling!r:.60}")
    for name in names:
        require_one_of(f"{what}: pooling", name, POOLINGS)
    return names


@short
class PoolCache(NamedTuple):
    """Saved by `pool` for backward: the weights of the tokens. y is linear in x."""

    weights: Array  # (B, 1, T)

    def backward(self, dy: Array) -> Array:
        """dx_t = weights_t dy."""
        require_gradient("pool", "dy", dy, self.weights, (self.weights.shape[0], dy.shape[-1]))
        return self.weights.mT * dy[:, None, :]


@short
class MaxPoolCache(NamedTuple):
    """Saved by `pool` for backward of the maximum: the token that it was taken from."""

    index: Array  # (B, D), of the token; the first of equal ones
    kept: Array  # (B, T), 1 for the tokens that are pooled

    def backward(self, dy: Array) -> Array:
        """dx_td = dy_d if the maximum of d was taken from token t, else 0."""
        require_gradient("pool", "dy", dy, self.kept, tuple(self.index.shape))
        xp = array_namespace(dy)
        return xp.where(_taken(self.index, self.kept), dy[:, None, :], 0.0)


@short
class JoinedPoolCache(NamedTuple):
    """Saved by `pool` for backward of several poolings: the cache of each."""

    parts: tuple[Any, ...]  # PoolCache or MaxPoolCache

    def backward(self, dy: Array) -> Array:
        """dx = the sum of the gradients of the parts, of which each has a D wide piece of dy."""
        n = len(self.parts)
        if dy.shape[-1] % n:
            raise ValueError(f"pool: dy must be (B, {n} D), got shape {tuple(dy.shape)}")
        d = dy.shape[-1] // n
        dx = self.parts[0].backward(dy[:, :d])
        for i, part in enumerate(self.parts[1:], 1):
            dx = dx + part.backward(dy[:, i * d : (i + 1) * d])
        return dx


def _tokens(x: Array, mask: Array | None) -> Array:
    """(B, T): 1 for tokens, 0 for padding."""
    xp = array_namespace(x)
    if mask is None:
        return xp.ones(x.shape[:2], dtype=x.dtype, device=device(x))
    return xp.astype(mask, x.dtype)


def _kept(tokens: Array, skip: int) -> Array:
    """(B, T): 1 for the tokens after the first `skip`."""
    if skip == 0:
        return tokens
    xp = array_namespace(tokens)
    return tokens * xp.astype(xp.cumulative_sum(tokens, axis=-1) > skip, tokens.dtype)


def _sum(x: Array, name: str, tokens: Array, skip: int) -> tuple[Array, PoolCache]:
    """The weighted sum of the tokens."""
    weights = _weights(name, tokens, _kept(tokens, skip))[:, None, :]
    return (weights @ x)[:, 0, :], PoolCache(weights)


def _weights(name: str, tokens: Array, kept: Array) -> Array:
    """(B, T): the weights of the tokens; 0 in a row without tokens.

    tokens: (B, T), 1 for tokens   kept: (B, T), 1 for the tokens that are pooled
    """
    xp = array_namespace(kept)
    if name in ("first", "last"):
        count = xp.cumulative_sum(kept, axis=-1)
        rank = count if name == "first" else count[:, -1:] - count + 1.0  # from 1
        return xp.where(rank == 1.0, kept, xp.zeros_like(kept))
    if name == "sum":
        return kept
    shares = xp.cumulative_sum(tokens, axis=-1) * kept if name == "weighted_mean" else kept
    total = xp.sum(shares, axis=-1, keepdims=True)
    total = xp.where(total == 0, 1.0, total)
    return shares / (xp.sqrt(total) if name == "mean_sqrt_len" else total)


def _max(x: Array, name: str, tokens: Array, skip: int) -> tuple[Array, MaxPoolCache]:
    """The maximum over the tokens; of equal tokens, the first is taken."""
    xp = array_namespace(x)
    kept = _kept(tokens, skip)
    low = xp.where(kept[:, :, None] == 0, -xp.inf, x)
    index = xp.argmax(low, axis=1)  # (B, D)
    y = xp.sum(xp.where(_taken(index, kept), x, 0.0), axis=1)
    return y, saved(MaxPoolCache(index, kept))


def _taken(index: Array, kept: Array) -> Array:
    """(B, T, D), bool: whether token t has index d, and is pooled."""
    xp = array_namespace(index)
    numbers = xp.arange(kept.shape[1], dtype=index.dtype, device=device(index))
    return (numbers[None, :, None] == index[:, None, :]) & (kept[:, :, None] != 0)
