"""Sums over rows in a fixed order."""

from __future__ import annotations

from xformer.backends.cupy.module import EVERY, Source, blocks, empty, launch
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.shapes import working_dtype

SOURCE = Source(__file__, dtypes=EVERY)
# Most blocks of the first stage, and fewest rows of a block. PARTS is fixed, so that the sums are
# the same on every device. With ROWS rows a block writes few bytes compared to those it reads.
PARTS, ROWS = 1024, 4
ROW_PARTS = 64  # most parts of `row_sums`, for each 32 columns
PART = 256  # fewest rows of a part of `row_sums`
EACH = 8  # rows of a warp, if a block then has more than one warp
SHARED = 48 << 10  # bytes of shared memory of a block on every device


def parts_of(rows: int) -> int:
    """Return the number of blocks for so many rows; each block writes one row of `parts`."""
    return min(PARTS, blocks(rows, ROWS))


def column_sums(parts: Array) -> Array:
    """Return out (K, D) = sum of parts (K, P, D) over P: the second stage."""
    k, n_parts, width = parts.shape
    return _summed(parts, k, n_parts, k * n_parts, width)


def row_sums(x: Array) -> Array:
    """Return out (D,) = sum of x (N, D), contiguous, over N; it takes one or two stages."""
    rows, width = x.shape
    size = max(PART, blocks(rows, ROW_PARTS))
    parts = _summed(x, max(1, blocks(rows, size)), size, rows, width)
    if parts.shape[0] == 1:
        return parts[0, :]
    return column_sums(array_namespace(x).reshape(parts, (1, *parts.shape)))[0, :]


def _summed(parts: Array, k: int, n_parts: int, total: int, width: int) -> Array:
    out = empty(parts, (k, width), working_dtype(parts))
    args = (parts, out, n_parts, total, width)
    warps = min(32, max(1, blocks(n_parts, EACH)))
    grid, block = (blocks(width, 32) * k,), (32 * warps,)
    launch(SOURCE, "column_sums", parts, grid=grid, block=block, args=args)
    return out


def fits_shared(size: int) -> int:
    """Return `size` if so many bytes of sums fit in shared memory, else 0."""
    return size if size <= SHARED - 1024 else 0  # block_reduce needs the rest
