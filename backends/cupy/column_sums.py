"""Sums over rows, in a fixed order."""

from __future__ import annotations

from array_api_compat import array_namespace

from xformer.backends.cupy.module import EVERY, Source, blocks, empty, launch
from xformer.shapes import working_dtype
from xformer.typing import Array

SOURCE = Source(__file__, dtypes=EVERY)
# Blocks of the first stage: a fixed number, so that every device makes the same sums. Each has rows
# enough that the sums are few bytes beside the rows.
PARTS, ROWS = 1024, 4
ROW_PARTS = 64  # of a sum over rows, for each 32 columns, at most
PART = 256  # rows that a part has at least
EACH = 8  # rows of a warp, where that leaves more than one warp to a block
SHARED = 48 << 10  # bytes that a block has on every device


def parts_of(rows: int) -> int:
    """How many blocks share that many rows, each with a row of `parts`."""
    return min(PARTS, blocks(rows, ROWS))


def column_sums(parts: Array) -> Array:
    """out (K, D) = sum of parts (K, P, D) over P: the second stage."""
    k, n_parts, width = parts.shape
    return _summed(parts, k, n_parts, k * n_parts, width)


def row_sums(x: Array) -> Array:
    """out (D,) = sum of x (N, D), contiguous, over N: both stages, or one where rows are few."""
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
    """`size` where that many bytes of sums fit in shared memory, 0 where they must lie outside."""
    return size if size <= SHARED - 1024 else 0  # the rest is for block_reduce
