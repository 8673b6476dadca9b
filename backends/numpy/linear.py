"""`linear` in pieces of rows or columns. The bias is added to a piece while it is in the cache.

It uses the thread pool of `threads`, not the threads of BLAS. Those wait by spinning, which takes
time from other threads and processes: with other processes on the machine, a token of GPT-2 takes
eight times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np

from xformer.backends.numpy import products
from xformer.backends.numpy.products import product
from xformer.backends.numpy.threads import aligned, run, single_blas_thread
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import is_inference, kernel
from xformer.dispatch.checks import require_gradient
from xformer.ops.linear import linear as reference

Map = tuple[Array, Array | None]  # w (I, O), b (O,)


@kernel(reference, "numpy")
def linear(
    x: Array, w: Array, b: Array | None = None, *, trainable: bool = True
) -> tuple[Array, NumpyLinearCache]:
    """y = x w + b. Each piece of y is computed by one thread."""
    (y,) = outputs(x, [(w, b)])
    return y, NumpyLinearCache(x if trainable else None, w, b, x.shape)


@short
class NumpyLinearCache(NamedTuple):
    """Saved by `linear` for backward: x for dw, and w for dx."""

    x: Array | None  # (..., I); None: w is not trained
    w: Array  # (I, O)
    b: Array | None  # (O,)
    x_shape: tuple[int, ...]

    def backward(self, dy: Array) -> tuple[Array, Array | None, Array | None]:
        """Return dx = dy w^T, dw = x^T dy, db = sum of the rows of dy, all three in one job."""
        require_gradient("linear", "dy", dy, self.w, (*self.x_shape[:-1], self.w.shape[1]))
        dx, ((dw, db),) = gradients(self.x, self.x_shape, [(self.w, self.b)], [dy])
        return dx, dw, db


def outputs(x: Array, maps: Sequence[Map]) -> list[Array]:
    """Return x w + b for each (w, b) in `maps`."""
    rows = _rows(x)
    ys = [aligned((len(rows), w.shape[1]), x.dtype) for w, _ in maps]
    if is_inference() and len(rows) <= products.FEW:
        _few_rows(rows, maps, ys)
    else:
        products_of_maps = (product(rows, w, y, b) for (w, b), y in zip(maps, ys, strict=True))
        run([piece for pieces in products_of_maps for piece in pieces])
    return [y.reshape(*x.shape[:-1], y.shape[1]) for y in ys]


def _few_rows(rows: Array, maps: Sequence[Map], ys: Sequence[Array]) -> None:
    """Write the products of a few rows to `ys`, on one thread unless several threads pay.

    Most of these products are done before another thread has woken.
    """
    n, size = len(rows), max(w.size for w, _ in maps)
    with single_blas_thread() if products.wakes_blas(n, size) else nullcontext():
        for (w, b), y in zip(maps, ys, strict=True):
            if products.worth_threads(n, w.size):
                run(product(rows, w, y, b))
                continue
            np.matmul(rows, w, out=y)
            if b is not None:
                y += b


def gradients(
    x: Array | None, x_shape: tuple[int, ...], maps: Sequence[Map], dys: Sequence[Array]
) -> tuple[Array, list[tuple[Array | None, Array | None]]]:
    """Return dx, the sum over all maps, and (dw, db) of each map.

    x: the input (..., I) of all maps; None: dw is not computed
    maps, dys: (w, b) of each map, and the gradient (..., O) of its output
    """
    rows, weights = [_rows(dy) for dy in dys], [w for w, _ in maps]
    dx = aligned((len(rows[0]), x_shape[-1]), rows[0].dtype)
    pieces = products.products([(dy, w.T) for dy, w in zip(rows, weights, strict=True)], dx)
    dmaps: list[tuple[Array | None, Array | None]] = []
    for (w, b), dy in zip(maps, rows, strict=True):
        dw = db = None
        if x is not None:
            dw = np.empty_like(w, dy.dtype)  # in w's memory order: that of a tied head is Fortran
            pieces += product(_rows(x).T, dy, dw)
        if b is not None:
            db = np.empty_like(b, dy.dtype)
            pieces += product(np.ones((1, len(dy)), dy.dtype), dy, db[None])
        dmaps.append((dw, db))
    run(pieces)
    return dx.reshape(x_shape), dmaps


def _rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
