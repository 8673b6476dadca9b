"""Rotary position embedding (RoPE): the rotation. `layers.rotary` computes the tables."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import require_like, shapes


@overridable
@shapes("x (B, H, T, K)")
def rope(x: Array, *, cos: Array, sin: Array, interleaved: bool = False) -> tuple[Array, RopeCache]:
    """Rotate pairs of channels: (a, b) -> (a cos - b sin, b cos + a sin).

    arXiv:2104.09864, eq. 34. The first R <= K channels of a head are rotated; the others stay
    unchanged.

    x, y: (B, H, T, K)
    cos, sin: (T, R/2) or (B, T, R/2), of the dtype of x, one column for each pair. They may include
        a factor.
    interleaved: if True, pairs are (2i, 2i + 1), as in Meta's Llama, llama2.c and GPT-J. If False,
        pairs are (i, i + R/2), as in Hugging Face's Llama.

    ValueError if shapes do not fit, TypeError if dtypes or libraries differ.
    Derivation: docs/derivations/rope.md
    """
    require_tables(x, cos, sin)
    return _rotated(x, cos, sin, interleaved), RopeCache(cos, sin, interleaved, tuple(x.shape))


@short
class RopeCache(NamedTuple):
    """Saved by `rope` for backward: only the tables, which all calls share."""

    cos: Array  # (T, R/2) or (B, T, R/2)
    sin: Array  # like cos
    interleaved: bool
    shape: tuple[int, ...]  # (B, H, T, K)

    def backward(self, dy: Array) -> Array:
        """dx is the transposed map of dy: the rotation by -sin. A factor in the tables stays."""
        require_gradient("rope", "dy", dy, self.cos, self.shape)
        return _rotated(dy, self.cos, -self.sin, self.interleaved)


def _rotated(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    xp = array_namespace(x)
    half = cos.shape[-1]
    if cos.ndim == 3:
        cos, sin = cos[:, None, :, :], sin[:, None, :, :]  # (B, 1, T, R/2), for all heads
    unrotated = x[..., 2 * half :]
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        pairs = xp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)  # (B, H, T, R/2, 2)
        parts = [xp.reshape(pairs, (*x.shape[:-1], 2 * half)), unrotated]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        parts = [a * cos - b * sin, b * cos + a * sin, unrotated]
    return xp.concat(parts, axis=-1)


def require_tables(x: Array, cos: Array, sin: Array) -> None:
    """ValueError unless the tables fit x; TypeError unless they have its working dtype."""
    batch, _, length, width = x.shape
    for name, table in (("cos", cos), ("sin", sin)):
        require_like("rope", name, table, x, working=True)
        shape = tuple(table.shape)
        fits = shape[:-1] in ((length,), (batch, length)) and 2 * shape[-1] <= width
        if not fits:
            raise ValueError(
                f"rope: {name} must be (T, R/2) or (B, T, R/2) with B = {batch}, T = {length} and "
                f"R <= K = {width} (from x), got shape {shape}"
            )
    if sin.shape != cos.shape:
        raise ValueError(
            f"rope: sin must have the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}"
        )
