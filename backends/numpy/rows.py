"""Views of arrays as rows or as one row, and blocks of rows that fit in a core's L2 cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends.numpy.threads import Piece, blocks, even_size, scratch
from xformer.base.typing import Array

BLOCK = 1 << 16  # elements; a few blocks fit in the L2 cache


def flat(x: Any) -> Array:
    """Return x as a 1-D array: a view if x is contiguous, else a copy."""
    return np.ascontiguousarray(x).reshape(-1)


def rows(x: Any) -> Array:
    """Return x (..., D) as (N, D): a view if x is contiguous, else a copy."""
    return np.ascontiguousarray(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def row_blocks(piece: Piece, n: int, width: int, block: int = BLOCK) -> None:
    """Call piece(start, stop) for blocks of n rows on all threads.

    A block has about `block` elements; a row has `width`.
    """
    blocks(piece, n, _max_rows(width, block))


def _max_rows(width: int, block: int) -> int:
    """Return the number of rows of a block."""
    return max(1, block // max(1, width))


def outer_factor(row: Array) -> Array:
    """Return (2, D): `row` (D,) and a row of zeros. It is a factor of an outer product by BLAS.

    column (N, 1) * row = (N, 2) @ (2, D), where (N, 2) is the column and a column of zeros. With
    two columns, BLAS takes half the time of broadcasting.
    """
    pair = np.zeros((2, row.size), row.dtype)
    pair[0] = row
    return pair


class Sums:
    """Sums of n rows: each block of `row_blocks` is summed alone, then the sums of the blocks.

    The order of additions is the same in every run. It is more exact than one running sum.
    """

    def __init__(self, n: int, width: int, dtype: Any, block: int = BLOCK) -> None:
        self.size = even_size(n, _max_rows(width, block))
        self.parts = np.empty((-(-n // self.size), width), dtype)  # a row for each block

    def block_sum(self, start: int) -> Array:
        """Return the array (width,) for the sum of the block that begins at row `start`."""
        part: Array = self.parts[start // self.size]
        return part

    def total(self) -> Array:
        """Return the sum of all rows, (width,)."""
        total: Array = self.parts[0] if len(self.parts) == 1 else np.add.reduce(self.parts, axis=0)
        return total


def masked(x: Array, keep: Array, out: Array) -> None:
    """Write x to `out`, but 0 for elements whose `keep` is 0 or False. All arrays are contiguous.

    It masks the bits of x: `np.where` takes twice as long.
    """
    integer = np.dtype(f"i{x.itemsize}")
    mask = scratch("mask", x.shape, integer)
    mask[...] = np.negative(keep.view(np.int8), out=scratch("keep", x.shape, np.int8))  # 0 or -1
    np.bitwise_and(x.view(integer), mask, out=out.view(integer))
