"""A linear map by its row of a plan's table: its product, and that one's backward, on this thread.

`by` as in `gemm.add_product`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.atomic import floats, place
from xformer.backends.numba.compiled import FEW, rowwise
from xformer.backends.numba.flash_rows import ONE, ZERO
from xformer.backends.numba.gemm import add_product
from xformer.backends.numba.layer import BIAS, BY_ROWS, N_IN, N_OUT, STEP, WEIGHT

from xformer.typing import Array

# Of a map's gradients: where they are, how the weights' lies, and whether more is added to them.
DW, DW_BY_ROWS, DB, MORE = range(4)


def places(dw: Array | None, db: Array | None) -> tuple[int, bool, int, bool]:
    """Where the gradients of a map are to be; None: they are left out."""
    return place(dw), dw is not None and dw.flags.c_contiguous, place(db), False


@rowwise
def multiply(by: Any, x: Any, own: Any, y: Any) -> None:
    """y = x w."""
    if own[BY_ROWS]:
        w = floats(own[WEIGHT], (own[N_IN], own[STEP]))[:, : own[N_OUT]]
        add_product(by, ONE, x, w, False, y)
    else:
        w = floats(own[WEIGHT], (own[N_OUT], own[STEP]))[:, : own[N_IN]]
        add_product(by, ONE, x, w.T, False, y)


@rowwise
def multiply_backward(by: Any, x: Any, own: Any, grads: Any, dy: Any, keep: bool, dx: Any) -> None:
    """dx = dy w^T + keep dx, dw = x^T dy, db = sum of dy over its rows; none at place 0."""
    if own[BY_ROWS]:
        w = floats(own[WEIGHT], (own[N_IN], own[STEP]))[:, : own[N_OUT]]
        add_product(by, ONE, dy, w.T, keep, dx)
    else:
        w = floats(own[WEIGHT], (own[N_OUT], own[STEP]))[:, : own[N_IN]]
        add_product(by, ONE, dy, w, keep, dx)
    more = grads[MORE] != 0
    if grads[DW] and grads[DW_BY_ROWS]:
        add_product(by, ONE, x.T, dy, more, floats(grads[DW], (own[N_IN], own[N_OUT])))
    elif grads[DW]:
        add_product(by, ONE, dy.T, x, more, floats(grads[DW], (own[N_OUT], own[N_IN])))
    if grads[DB]:
        _sum_rows(dy, more, floats(grads[DB], (own[N_OUT],)))


@rowwise
def _sum_rows(x: Any, more: bool, out: Any) -> None:
    sums = np.zeros(x.shape[1], np.float32)
    if not more:
        out[:] = ZERO
    for i in range(len(x)):
        for j in range(x.shape[1]):
            sums[j] += x[i, j]
        if i % FEW == FEW - 1 or i == len(x) - 1:
            out += sums
            sums[:] = ZERO


@rowwise
def bias(own: Any) -> Any:
    """Of a map; zeros where it has none."""
    b = np.zeros(own[N_OUT], np.float32)
    if own[BIAS]:
        b[:] = floats(own[BIAS], (own[N_OUT],))
    return b


@rowwise
def add(y: Any, b: Any) -> None:
    for i in range(len(y)):
        for j in range(y.shape[1]):
            y[i, j] += b[j]
