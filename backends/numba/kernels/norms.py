"""Parts that `layer_norm`, `rms_norm` and `add_norm` share: operands, rows, sums over pieces."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.jit import FEW, elementwise
from xformer.backends.numba.kernels.layout import dense, in_order, order_of
from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.copies import contiguous
from xformer.backends.numba.program.program import program_of
from xformer.backends.numba.program.traced import Traced, constant

GROUP = FEW  # rows that all steps of a kernel process before the next rows: they stay in the cache


def operands(x: Traced, r: Traced | None, w: Traced | None, b: Traced | None) -> tuple[Any, ...]:
    """Return (x, r, w, b) as a forward kernel reads them: without gaps, r in the layout of x.

    x, r: (..., D)   w, b: (D,). r None stays None. w None becomes ones, b None becomes zeros.
    """
    program_of(x, r, w, b)  # Unrecorded if one is an array of NumPy
    width = x.shape[-1]
    x = dense(x, 1)
    r = None if r is None else in_order(r, order_of(x, 1))
    w = constant(np.ones(width, np.float32)) if w is None else contiguous(w)
    b = constant(np.zeros(width, np.float32)) if b is None else contiguous(b)
    return x, r, w, b


def summed(parts: Traced) -> Traced:
    """Return the sum of parts (pieces, D) over pieces, in order."""
    return parts[0] if len(parts) == 1 else namespace.sum(parts, axis=0)


@elementwise
def add_to(out: Any, x: Any) -> None:
    """Add x to out, in place. Both: (n, D)."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] += x[i, j]


@elementwise
def add(x: Any, r: Any, out: Any) -> None:
    """Write out = x + r. All: (n, D)."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = x[i, j] + r[i, j]
