"""`linear_cross_entropy`: forward computes the gradients too, while logits are in the cache.

It works on a chunk of rows at a time, so that memory does not grow with the number of rows times
classes. Gradients of the weights are summed over chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.kernels.gemm import add_bias, matmul_operand, matrix_strides, product
from xformer.backends.numba.kernels.layout import recorded
from xformer.backends.numba.kernels.linear import column_sums, rows_of, weight_gradient
from xformer.backends.numba.kernels.losses import (
    Options,
    Tokens,
    differentiate,
    option_array,
    tokens_of,
    weighted_sum,
)
from xformer.backends.numba.matmul import matmul_unsupported
from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.copies import contiguous, reshape
from xformer.backends.numba.program.native import (
    Native,
    bits,
    float32s,
    native,
    numbers,
    part,
    real,
    words,
)
from xformer.backends.numba.program.program import Program, program_of
from xformer.backends.numba.program.traced import constant
from xformer.backends.numba.registers import HIGH
from xformer.backends.numba.tuning import SPEED
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import is_inference
from xformer.dispatch.checks import require_gradient
from xformer.ops._loss import loss_options

CHUNK = 1 << 24  # logits of a chunk, about: 64 MB
LOGITS = 1 << 19  # logits that a thread computes at a time: they stay in caches near the core
ROWS = 384  # rows of a thread at a time, at least: it reads all weights for each group of rows


def _refuses(x: Array, w: Array, b: Array | None = None, **options: Any) -> str | None:
    if w.shape[1] == 0:
        return "only float32, and at least one class"
    if options.get("reduction") == "none":
        return 'reduction "none" has a dloss for each token'
    return matmul_unsupported()


@recorded(ops.linear_cross_entropy, _refuses)
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    trainable: bool = True,
    **options: Any,
) -> tuple[Array, NumbaLinearCrossEntropyCache | None]:
    """Return the loss of the logits x w + b, and a cache with its gradients.

    The cache is None within `inference()`.
    """
    checked = Options(*loss_options(**options))
    recorder = program_of(x, w, b, targets)
    tokens = tokens_of(recorder, w, targets, checked)
    rows = contiguous(rows_of(x))
    if checked.ignore_index is not None:  # a NaN in an ignored row would make dw NaN
        counts: Array = reshape(tokens.targets, (-1, 1))
        rows = namespace.where(counts >= 0, rows, 0.0)
    head = _Head(recorder, rows, matmul_operand(w), b, checked)
    back = not is_inference()
    losses = recorder.fresh((head.x.shape[0],), np.float32)
    dx = recorder.fresh(head.x.shape if back else (0,), np.float32)
    dw = db = None
    for chunk in _chunks(head.x.shape[0], w.shape[1]):
        dlogits = head.differentiate(tokens, chunk, losses, dx, back=back)
        if back and trainable:
            dw = weight_gradient(recorder, head.x[chunk], w, dlogits, dw)
        if back and b is not None:
            db = column_sums(recorder, dlogits, db)
    loss = weighted_sum(losses, tokens.weight)
    cache = NumbaLinearCrossEntropyCache(reshape(dx, x.shape), dw, db) if back else None
    return loss, cache


@short
class NumbaLinearCrossEntropyCache(NamedTuple):
    """Saved by `linear_cross_entropy` for backward: gradients for dloss = 1."""

    dx: Array  # (..., D)
    dw: Array | None  # (D, V); None: w is not trained
    db: Array | None  # (V,)

    def backward(self, dloss: Array | None = None) -> tuple[Array, Array | None, Array | None]:
        """Return dloss times the gradients, or the saved arrays if dloss is known to be 1."""
        dloss = constant(np.ones((), np.float32)) if dloss is None else dloss
        require_gradient("linear_cross_entropy", "dloss", dloss, self.dx, ())
        if dloss.is_constant and dloss == 1:
            return self.dx, self.dw, self.db
        dx, dw, db = (None if grad is None else grad * dloss for grad in self)
        return dx, dw, db


def _chunks(n: int, n_classes: int) -> list[slice]:
    """Return slices of n rows, each of about `CHUNK` logits; one empty slice if n is 0."""
    size = max(1, -(-n // max(1, round(n * n_classes / CHUNK))))
    return [slice(start, min(start + size, n)) for start in range(0, max(n, 1), size)]


class _Head(NamedTuple):
    """The arrays and options of one call of `linear_cross_entropy`."""

    recorder: Program
    x: Array  # (N, D), of contiguous rows
    w: Array  # (D, V)
    b: Array | None
    options: Options

    def differentiate(
        self, tokens: Tokens, chunk: slice, losses: Array, dx: Array, *, back: bool
    ) -> Array:
        """Record the instruction for one chunk, and return its dlogits (n, V).

        chunk: its rows. losses (N,): the instruction writes those rows. dx (N, D): if `back`,
        it writes those rows too.
        """
        recorder, x, w, b, options = self.recorder, self.x[chunk], self.w, self.b, self.options
        (n, d), n_classes = x.shape, w.shape[1]
        dlogits = recorder.fresh((n, n_classes), np.float32)
        layout = matrix_strides(w)
        assert layout is not None  # after `matmul_operand`
        outs = losses[chunk], dx[chunk] if back else dx, dlogits
        ins = [x, w, tokens.targets[chunk], tokens.weight] + ([] if b is None else [contiguous(b)])
        n_rows = max(ROWS, LOGITS // n_classes)
        sizes = n, d, n_classes, *layout, int(b is not None), int(back), n_rows
        pieces = recorder.pieces(n * d * n_classes // SPEED)
        constants = *sizes, *map(bits, options.numbers().values())
        compiled = Native(differentiate_linear, constants, pieces, blas=True)
        recorder.emit("linear loss", outs, ins, compiled)
        return dlogits


@native
def differentiate_linear(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute losses, dlogits and dx of a piece of the rows: logits = x w + b.

    outputs: losses (N,), dx (N, D), dlogits (N, V); inputs: x (N, D), w (D, V), targets (N,) int64,
    weight (1,), and b (V,) if present. integers: N, D, V, row and column stride of w in bytes,
    whether there is b, whether to compute dx, rows at a time, bits of label smoothing and z loss.
    """
    ptr, a = words(args, 8), numbers(args, 10)
    n, d, v, row_stride, column_stride, has_b, back = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
    options = option_array(real(a[8]), real(a[9]), float32s(ptr[6], (1,))[0])
    start, stop = part(n, piece, pieces, HIGH)
    for first in range(start, stop, a[7]):
        rows = min(a[7], stop - first)
        x, logits = (ptr[3] + 4 * first * d, 4 * d, 4), ptr[2] + 4 * first * v
        w = ptr[4], row_stride, column_stride
        product(memory, x, w, False, (logits, 4 * v), (rows, v, d))
        if has_b:
            add_bias(ptr[7], (logits, 4 * v), (rows, v))
        targets, losses = words(ptr[5] + 8 * first, rows), float32s(ptr[0] + 4 * first, (rows,))
        differentiate(float32s(logits, (rows, v)), targets, options, losses)
        if back:
            dx, w_t = (ptr[1] + 4 * first * d, 4 * d), (ptr[4], column_stride, row_stride)
            product(memory, (logits, 4 * v, 4), w_t, False, dx, (rows, d, v))
