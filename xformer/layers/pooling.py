"""Pooling: one vector for a sequence."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace, device

from xformer import renamed
from xformer.checks import require_gradient, require_mask, require_one_of, require_vectors
from xformer.shapes import STORED, dtype_name
from xformer.showing import short
from xformer.typing import Array

POOLINGS = ("mean", "first", "last")


@renamed.arguments(how="pooling")
def pool(x: Array, *, pooling: str = "mean", mask: Array | None = None) -> tuple[Array, PoolCache]:
    """y = sum_t weights_t x_t: the mean over the tokens, or the first or last token.

    x: (B, T, D)   y: (B, D); 0 for a sequence without tokens
    pooling: "mean", "first" or "last"
    mask: (B, T), True = a token, False = padding; None: no padding
    ValueError for another pooling and for shapes that do not fit. TypeError for x of two-byte
    numbers.
    """
    require_one_of("pool: pooling", pooling, POOLINGS)
    require_vectors("pool", "x", x)
    if dtype_name(x) in STORED:
        raise TypeError(f"pool: x must be float32 or float64, got {dtype_name(x)}")
    if mask is not None:
        require_mask("pool", "mask", mask, x)
        if tuple(mask.shape) != tuple(x.shape[:2]):
            raise ValueError(
                f"pool: mask must be (B, T) = {tuple(x.shape[:2])}, got {tuple(mask.shape)}"
            )
    weights = _weights(x, pooling, mask)
    y = (weights @ x)[:, 0, :]
    return y, PoolCache(weights)


@short
class PoolCache(NamedTuple):
    """Saved by `pool` for backward: the weights of the tokens. y is linear in x."""

    weights: Array  # (B, 1, T)

    def backward(self, dy: Array) -> Array:
        """dx_t = weights_t dy."""
        require_gradient("pool", "dy", dy, self.weights, (self.weights.shape[0], dy.shape[-1]))
        return self.weights.mT * dy[:, None, :]


def _weights(x: Array, pooling: str, mask: Array | None) -> Array:
    """(B, 1, T): the weights of the tokens. Rows sum to 1, or are 0 without tokens."""
    xp = array_namespace(x)
    if mask is None:
        mask = xp.ones(x.shape[:2], dtype=xp.bool, device=device(x))
    ones = xp.astype(mask, x.dtype)  # (B, T), 1 for tokens
    if pooling == "mean":
        total = xp.sum(ones, axis=-1, keepdims=True)
        weights = ones / xp.where(total == 0, 1.0, total)
    else:
        count = xp.cumulative_sum(ones, axis=-1)
        rank = count if pooling == "first" else count[:, -1:] - count + 1.0  # from 1
        weights = xp.where(mask & (rank == 1.0), 1.0, xp.zeros_like(ones))
    return weights[:, None, :]
