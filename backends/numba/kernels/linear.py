"""`linear` as products; weights are read, and their gradients written, as they lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.gemm import no_products
from xformer.backends.numba.kernels.gemm import (
    Pair,
    Sums,
    emit_parts,
    emit_products,
    emit_sums,
    factor,
    steps,
    sum_rows,
)
from xformer.backends.numba.program import namespace, program
from xformer.backends.numba.program.namespace import contiguous, reshape
from xformer.backends.numba.program.native import Native
from xformer.backends.numba.program.program import Program
from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.showing import short
from xformer.typing import Array


def unsupported(
    x: Array, w: Array, b: Array | None = None, *, trainable: bool = True
) -> str | None:
    """Why the kernel cannot run."""
    arrays = [array for array in (x, w, b) if array is not None]
    if any(array.dtype != np.float32 for array in arrays):
        return "only float32"
    return "all arrays are constants" if program.of(arrays) is None else no_products()


@kernel(ops.linear, "numba.kernels", unsupported=unsupported)
def linear(
    x: Array, w: Array, b: Array | None = None, *, trainable: bool = True
) -> tuple[Array, LinearCache]:
    """y = x w + b."""
    y, sums, cache = begun(x, w, b, trainable=trainable)
    emit_sums("linear", sums)
    return y, cache


def begun(
    x: Array, w: Array, b: Array | None, *, trainable: bool
) -> tuple[Array, list[Sums], LinearCache]:
    """`linear`, less the sums that are still to be recorded: those of several maps go together."""
    recorder, rows = program.of([x, w, b]), rows_of(x)
    assert recorder is not None  # else this were unsupported
    y = recorder.fresh((rows.shape[0], w.shape[1]), np.float32)
    sums = emit_parts("linear", y, [Pair(rows, w)], b)
    cache = LinearCache(rows if trainable else None, w, b is not None, x.shape)
    return reshape(y, (*x.shape[:-1], w.shape[1])), [sums] if sums else [], cache


@short
class LinearCache(NamedTuple):
    """Saved by `linear` for backward."""

    x: Array | None  # (N, I); None: w is not trained
    w: Array  # (I, O)
    has_b: bool
    x_shape: tuple[int, ...]

    def backward(self, dy: Array) -> tuple[Array, Array | None, Array | None]:
        """dx = dy w^T, dw = x^T dy, db = sum of dy over its rows."""
        dy = self.checked(dy)
        return input_gradient([self], [dy]), *self.gradients(dy)

    def checked(self, dy: Array) -> Array:
        """dy (N, O); ValueError, TypeError where it is none."""
        require_gradient("linear", "dy", dy, self.w, (*self.x_shape[:-1], self.w.shape[1]))
        return rows_of(dy)

    def gradients(self, dy: Array) -> tuple[Array | None, Array | None]:
        """Those of w and b."""
        recorder = program.of([self.x, self.w, dy])
        if recorder is None:  # then x is not kept, and dy is known
            return None, namespace.sum(dy, axis=0) if self.has_b else None
        dw = None if self.x is None else weight_gradient(recorder, self.x, self.w, dy)
        return dw, column_sums(recorder, dy) if self.has_b else None


def input_gradient(caches: Sequence[LinearCache], dys: Sequence[Array]) -> Array:
    """That of the one x of several maps, in one instruction."""
    pairs = [Pair(dy, cache.w.T) for cache, dy in zip(caches, dys, strict=True)]
    shape = dys[0].shape[0], caches[0].w.shape[0]
    recorder = program.of([x for pair in pairs for x in pair])
    if recorder is None:
        dx = functools.reduce(namespace.add, (namespace.matmul(dy, w) for dy, w in pairs))
        return reshape(dx, caches[0].x_shape)
    dx = recorder.fresh(shape, np.float32)
    emit_products("linear dx", dx, pairs)
    return reshape(dx, caches[0].x_shape)


def weight_gradient(
    recorder: Program, x: Array, w: Array, dy: Array, before: Array | None = None
) -> Array:
    """x^T dy + before, which lie as w does."""
    layout = steps(w)
    if layout is None or layout[1] == 4:
        dw = recorder.fresh(w.shape, np.float32)
        emit_products("linear dw", dw, [Pair(x.T, dy)], before)
        return dw
    dw = recorder.fresh(w.shape[::-1], np.float32)
    emit_products("linear dw", dw, [Pair(dy.T, x)], None if before is None else before.T)
    return dw.T


def column_sums(recorder: Program, dy: Array, before: Array | None = None) -> Array:
    """The sum of the rows of dy (N, O), in their order, + before (O,)."""
    dy = contiguous(dy)
    n, m = dy.shape
    db = recorder.fresh((m,), np.float32)

    def run(db: Any, dy: Any, before: Any = 0) -> None:
        np.add(np.sum(dy, axis=0), before, out=db)

    own = Native(sum_rows, (n, m, int(before is not None)), recorder.pieces(dy.size))
    recorder.emit("linear db", run, [db], [dy] if before is None else [dy, before], own)
    return db


def rows_of(x: Array) -> Array:
    """(N, I) of (..., I), as products can read it."""
    return factor(reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])))
