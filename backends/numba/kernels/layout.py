"""The order of an array's axes in memory, so that a result can have the same order as an operand.

Heads are often a transposed view of rows; a kernel that keeps their order copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.program.namespace import contiguous, copied
from xformer.backends.numba.program.program import Program, of
from xformer.backends.numba.program.traced import Traced, Unrecorded

Order = tuple[int, ...]  # axes, the one with the longest stride first


def unrecordable(*arrays: Traced | None) -> str | None:
    """Return why a float32 kernel cannot take these arrays (None: absent), or None if it can."""
    present = [x for x in arrays if x is not None]
    if any(x.dtype != np.float32 for x in present):
        return "only float32"
    return None if any(not x.is_constant for x in present) else "all arrays are constants"


def program_of(*arrays: Any) -> Program:
    """Return the program that records these arrays. Unrecorded if all of them are constants."""
    program = of(arrays)
    if program is None:
        raise Unrecorded("a kernel gets constants only, as of an empty batch")
    return program


def order_of(x: Traced, inner: int = 0) -> Order:
    """Return the axes of x, those with the largest |stride| first.

    inner: the last `inner` axes are not sorted. They keep their places at the end.
    """
    outer = x.ndim - inner
    by_stride = sorted(range(outer), key=lambda i: -abs(x.strides[i]))
    return (*by_stride, *range(outer, x.ndim))


def dense(x: Traced, inner: int = 0) -> Traced:
    """Return x if its elements fill memory without gaps in the order `order_of(x, inner)`.

    Otherwise return a copy.
    """
    return x if x.layout.transpose(order_of(x, inner)).flags.c_contiguous else copied(x)


def in_order(x: Traced, order: Order) -> Traced:
    """Return x, or a copy, whose elements fill memory without gaps in this order of axes."""
    return _back(contiguous(x.view(x.layout.transpose(order))), order)


def fresh_in(program: Program, order: Order, shape: Sequence[int], dtype: Any) -> Traced:
    """Return a new array of this shape whose elements fill memory in this order of axes."""
    return _back(program.fresh([shape[i] for i in order], dtype), order)


def _back(ordered: Traced, order: Order) -> Traced:
    """Undo the transposition by `order`: return a view with the axes numbered as before."""
    return ordered.view(ordered.layout.transpose(np.argsort(order)))
