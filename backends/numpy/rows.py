"""Arrays as rows or flat, and their blocks, a few of which fit in a core's L2 cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends.numpy.threads import Piece, blocks, even, scratch
from xformer.typing import Array

BLOCK = 1 << 16  # elements


def flat(x: Any) -> Array:
    """x as one row; a copy where it is not contiguous."""
    return np.ascontiguousarray(x).reshape(-1)


def rows(x: Any) -> Array:
    """x as (N, D), D its last axis; a copy where it is not contiguous."""
    return np.ascontiguousarray(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def row_blocks(piece: Piece, n: int, width: int, block: int = BLOCK) -> None:
    """piece(start, stop) for blocks of n rows of that width, on all threads."""
    blocks(piece, n, _most(width, block))


def _most(width: int, block: int) -> int:
    return max(1, block // max(1, width))


def factor(row: Array) -> Array:
    """What a (N, 2) of a column and zeros is multiplied with for the product of column and row.

    An outer product by BLAS, which wants two columns, takes half as long as broadcasting.
    """
    pair = np.zeros((2, row.size), row.dtype)
    pair[0] = row
    return pair


class Sums:
    """Sums over rows: of each block of `row_blocks` alone, then of these in their order.

    The same in every run, and more exact than one running sum.
    """

    def __init__(self, n: int, width: int, dtype: Any, block: int = BLOCK) -> None:
        self.size = even(n, _most(width, block))
        self.parts = np.empty((-(-n // self.size), width), dtype)

    def of(self, start: int) -> Array:
        """Where the block that begins at row `start` puts its sum."""
        part: Array = self.parts[start // self.size]
        return part

    def total(self) -> Array:
        """The sum over all rows."""
        first: Array = self.parts[0] if len(self.parts) == 1 else np.add.reduce(self.parts, axis=0)
        return first


def masked(x: Array, keep: Array, out: Array) -> None:
    """x where `keep`, else 0, of contiguous arrays, by bits: `where` takes twice as long."""
    integer = np.dtype(f"i{x.itemsize}")
    mask = scratch("mask", x.shape, integer)
    mask[...] = np.negative(keep.view(np.int8), out=scratch("keep", x.shape, np.int8))  # 0 or -1
    np.bitwise_and(x.view(integer), mask, out=out.view(integer))
