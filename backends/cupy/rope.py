"""`rope` in one launch that reads x by its strides; y has the same order of axes in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.backends.cupy.attention import heads_first
from xformer.backends.cupy.module import EVERY, Source, blocks, contiguous, empty, launch
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_shape
from xformer.dispatch.shapes import STORED, require_same_device, require_same_library
from xformer.ops.rope import require_tables
from xformer.ops.rope import rope as reference

SOURCE = Source(__file__, dtypes=EVERY)
BLOCK = 256  # threads


@kernel(reference, "cupy", storage_dtypes=STORED)
def rope(
    x: Array, *, cos: Array, sin: Array, interleaved: bool = False
) -> tuple[Array, CupyRopeCache]:
    """Return (y, cache): pairs of channels (a, b) become (a cos - b sin, b cos + a sin).

    x: (B, H, T, K)   cos, sin: (T, R/2) or (B, T, R/2)
    interleaved: whether the pairs are neighbours (2i, 2i + 1), else (i, i + R/2)
    """
    require_tables(x, cos, sin)
    cos, sin = contiguous(cos), contiguous(sin)
    cache = CupyRopeCache(cos, sin, interleaved, tuple(x.shape), x.dtype)
    return _rotated(x, cos, sin, interleaved, 1), cache


@short
class CupyRopeCache(NamedTuple):
    """Saved by `rope` for backward: the tables, which all calls share."""

    cos: Array  # (T, R/2) or (B, T, R/2)
    sin: Array  # like cos
    interleaved: bool
    shape: tuple[int, ...]  # (B, H, T, K)
    dtype: Any  # of x

    def backward(self, dy: Array) -> Array:
        """Return dx: dy rotated by the opposite angles; dy: (B, H, T, K)."""
        require_shape("rope", "dy", dy, self.shape)
        require_same_library("rope", "dy", dy, self.cos)
        require_same_device("rope", "dy", dy, self.cos)
        if dy.dtype != self.dtype:
            raise TypeError(f"rope: dy must be {self.dtype.name}, got {dy.dtype.name}")
        return _rotated(dy, self.cos, self.sin, self.interleaved, -1)


def _rotated(x: Array, cos: Array, sin: Array, interleaved: bool, sign: int) -> Array:
    """Return x rotated by the angles, or by the opposite angles if `sign` is -1.

    If the heads of a token are adjacent in x, they are adjacent in the result, and merge as a view.
    """
    batch, heads, length, width = x.shape
    half, rows = cos.shape[-1], batch * heads * length
    by_token = x.strides[1] < x.strides[2]
    y = empty(x, (batch, length, heads, width) if by_token else None)
    sizes = rows, heads, length, width, half
    strides = [stride // x.dtype.itemsize for stride in x.strides]
    layout = length * half if cos.ndim == 3 else 0, int(by_token), int(interleaved)
    across = min(BLOCK, max(1, 1 << (half - 1).bit_length() if half else 32))
    launch(
        SOURCE,
        "rope",
        x,
        grid=(blocks(rows, BLOCK // across),),
        block=(across, BLOCK // across),
        args=(x, cos, sin, y, *sizes, *strides, *layout, sign),
    )
    return heads_first(y) if by_token else y
