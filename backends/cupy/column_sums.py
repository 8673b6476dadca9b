"""The second stage of sums over rows."""

from __future__ import annotations

from xformer.backends.cupy.module import Source, blocks, empty, launch

from xformer.typing import Array

SOURCE = Source(__file__)
# Blocks of the first stage: a fixed number, so that every device makes the same sums.
PARTS = 512
SHARED = 48 << 10  # bytes that a block has on every device


def column_sums(parts: Array) -> Array:
    """out (K, D) = sum of parts (K, P, D) over P, in a fixed order."""
    k, n_parts, width = parts.shape
    out = empty(parts, (k, width))
    grid = (blocks(width, 32), k)
    launch(SOURCE, "column_sums", parts, grid=grid, block=(256,), args=(parts, out, n_parts, width))
    return out


def fits_shared(size: int) -> int:
    """`size` where that many bytes of sums fit in shared memory, 0 where they must lie outside."""
    return size if size <= SHARED - 1024 else 0  # the rest is for block_reduce
