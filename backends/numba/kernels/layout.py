"""Results that lie in memory as an operand does: heads that are a view of a row are not copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.program.namespace import contiguous, copied
from xformer.backends.numba.program.program import Program, of
from xformer.backends.numba.program.traced import Traced

Order = tuple[int, ...]


def unrecordable(*arrays: Traced | None) -> str | None:
    """Why a kernel of float32 cannot run: another dtype, or nothing that differs between runs."""
    given = [x for x in arrays if x is not None]
    if any(x.dtype != np.float32 for x in given):
        return "only float32"
    return None if any(not x.is_constant for x in given) else "all of it is constant"


def program_of(*arrays: Any) -> Program:
    """The program of arrays of which one at least is not constant."""
    program = of(arrays)
    assert program is not None
    return program


def order_of(x: Traced, inner: int = 0) -> Order:
    """The axes of x by their strides, the longest first; the last `inner` axes stay last."""
    outer = x.ndim - inner
    by_stride = sorted(range(outer), key=lambda i: -abs(x.strides[i]))
    return (*by_stride, *range(outer, x.ndim))


def dense(x: Traced, inner: int = 0) -> Traced:
    """x where its elements fill memory in that order of axes, else a copy."""
    return x if x.layout.transpose(order_of(x, inner)).flags.c_contiguous else copied(x)


def in_order(x: Traced, order: Order) -> Traced:
    """x where its elements fill memory in this order of axes, else a copy that does."""
    return _back(contiguous(x.view(x.layout.transpose(order))), order)


def fresh_in(program: Program, order: Order, shape: Sequence[int], dtype: Any) -> Traced:
    """A new array of this shape whose elements fill memory in this order of axes."""
    return _back(program.fresh([shape[i] for i in order], dtype), order)


def _back(ordered: Traced, order: Order) -> Traced:
    return ordered.view(ordered.layout.transpose(np.argsort(order)))
