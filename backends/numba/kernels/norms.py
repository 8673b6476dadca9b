"""What `layer_norm`, `rms_norm` and `add_norm` share: rows, and gradients summed over pieces."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import FEW, elementwise, inlined
from xformer.backends.numba.kernels.layout import dense, in_order, order_of
from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.native import float32s
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.traced import Traced, constant

GROUP = FEW  # rows at once: still in the cache when what is left of them is done


def terms(x: Traced, r: Traced | None, w: Traced | None, b: Traced | None) -> tuple[Any, ...]:
    """Operands of a forward: rows without gaps, r as x lies; a gain of 1 for none, a bias of 0."""
    width = x.shape[-1]
    x = dense(x, 1)
    r = None if r is None else in_order(r, order_of(x, 1))
    w = constant(np.ones(width, np.float32)) if w is None else namespace.contiguous(w)
    b = constant(np.zeros(width, np.float32)) if b is None else namespace.contiguous(b)
    return x, r, w, b


def pieces_of(program: Program, x: Traced) -> int:
    """In how many pieces the rows of x are cut."""
    return max(1, min(program.pieces(x.size), x.size // x.shape[-1]))


def summed(parts: Traced) -> Traced:
    """The sum over pieces, in their order. parts: (pieces, D)."""
    return parts[0] if len(parts) == 1 else namespace.sum(parts, axis=0)


@inlined
def block(address: Any, start: Any, stop: Any, width: Any) -> Any:
    """Rows of an array of this width."""
    return float32s(address + 4 * start * width, (stop - start, width))


@elementwise
def add(out: Any, x: Any) -> None:
    """out += x."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] += x[i, j]


@elementwise
def sum_of(x: Any, r: Any, out: Any) -> None:
    """out = x + r."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = x[i, j] + r[i, j]
