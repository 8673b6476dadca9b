"""`linear` by matmuls that read weights in any layout; dw has the layout of w."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.kernels.gemm import (
    Pair,
    PendingSum,
    emit_parts,
    emit_products,
    emit_sums,
    matmul_operand,
    matrix_strides,
    sum_rows,
)
from xformer.backends.numba.kernels.layout import record, recorded
from xformer.backends.numba.matmul import matmul_unsupported
from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.copies import reshape
from xformer.backends.numba.program.program import Program, common_program, program_of
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient


@recorded(ops.linear, lambda *_, **__: matmul_unsupported())
def linear(
    x: Array, w: Array, b: Array | None = None, *, trainable: bool = True
) -> tuple[Array, NumbaLinearCache]:
    """y = x w + b."""
    y, sums, cache = emit_linear(x, w, b, trainable=trainable)
    emit_sums("linear", sums)
    return y, cache


def emit_linear(
    x: Array, w: Array, b: Array | None, *, trainable: bool
) -> tuple[Array, list[PendingSum], NumbaLinearCache]:
    """Record y = x w + b, except for the second instruction if the matmul is split.

    Return y, what `emit_sums` needs for that instruction (or an empty list), and the cache.
    `linear_many` records the second instructions of several maps one after the other.
    """
    recorder, rows = program_of(x, w, b), rows_of(x)
    y = recorder.fresh((rows.shape[0], w.shape[1]), np.float32)
    sums = emit_parts("linear", y, [Pair(rows, w)], b)
    cache = NumbaLinearCache(rows if trainable else None, w, b is not None, x.shape)
    return reshape(y, (*x.shape[:-1], w.shape[1])), [sums] if sums else [], cache


@short
class NumbaLinearCache(NamedTuple):
    """Saved by `linear` for backward: x only if w is trained."""

    x: Array | None  # (N, I); None: w is not trained
    w: Array  # (I, O)
    has_b: bool
    x_shape: tuple[int, ...]

    def backward(self, dy: Array) -> tuple[Array, Array | None, Array | None]:
        """dx = dy w^T, dw = x^T dy, db = sum of dy over its rows."""
        dy = self.checked_rows(dy)
        return input_gradient([self], [dy]), *self.parameter_gradients(dy)

    def checked_rows(self, dy: Array) -> Array:
        """Return dy (..., O) as (N, O); ValueError or TypeError for a wrong shape or dtype."""
        require_gradient("linear", "dy", dy, self.w, (*self.x_shape[:-1], self.w.shape[1]))
        return rows_of(dy)

    def parameter_gradients(self, dy: Array) -> tuple[Array | None, Array | None]:
        """Return (dw, db). dy: (N, O). dw None: w is not trained; db None: there is no b."""
        recorder = common_program([self.x, self.w, dy])
        if recorder is None:  # x is not saved, and dy is a constant
            return None, namespace.sum(dy, axis=0) if self.has_b else None
        dw = None if self.x is None else weight_gradient(recorder, self.x, self.w, dy)
        return dw, column_sums(recorder, dy) if self.has_b else None


def input_gradient(caches: Sequence[NumbaLinearCache], dys: Sequence[Array]) -> Array:
    """Return dx, the sum of dy w^T over several maps of one x, by one instruction."""
    pairs = [Pair(dy, cache.w.T) for cache, dy in zip(caches, dys, strict=True)]
    shape = dys[0].shape[0], caches[0].w.shape[0]
    recorder = common_program([x for pair in pairs for x in pair])
    if recorder is None:
        dx = functools.reduce(namespace.add, (namespace.matmul(dy, w) for dy, w in pairs))
        return reshape(dx, caches[0].x_shape)
    dx = recorder.fresh(shape, np.float32)
    emit_products("linear dx", dx, pairs)
    return reshape(dx, caches[0].x_shape)


def weight_gradient(
    recorder: Program, x: Array, w: Array, dy: Array, initial: Array | None = None
) -> Array:
    """Return dw = x^T dy + initial in the memory layout of w (I, O). x: (N, I)   dy: (N, O)"""
    layout = matrix_strides(w)
    if layout is None or layout[1] == 4:
        dw = recorder.fresh(w.shape, np.float32)
        emit_products("linear dw", dw, [Pair(x.T, dy)], initial)
        return dw
    dw = recorder.fresh(w.shape[::-1], np.float32)
    emit_products("linear dw", dw, [Pair(dy.T, x)], None if initial is None else initial.T)
    return dw.T


def column_sums(recorder: Program, dy: Array, initial: Array | None = None) -> Array:
    """Return db = sum of the rows of dy (N, O), in order, + initial (O,)."""
    pieces = recorder.pieces(dy.size)
    return record(sum_rows, "linear db", dy, initial, program=recorder, pieces=pieces)[0]


def rows_of(x: Array) -> Array:
    """Return x (..., I) as (N, I), in a layout that `product` can read."""
    return matmul_operand(reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])))
