"""`linear_cross_entropy`: logits become their own gradient while they are near.

Of some rows at once, so that memory does not grow with all logits; weight gradients of the next
rows are added to the last ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.gemm import no_products
from xformer.backends.numba.kernels.gemm import add_bias, factor, product, steps
from xformer.backends.numba.kernels.linear import column_sums, rows_of, weight_gradient
from xformer.backends.numba.kernels.losses import (
    Options,
    Tokens,
    checked,
    differentiate,
    numbers_of,
    tokens_of,
    total,
)
from xformer.backends.numba.program import namespace, program
from xformer.backends.numba.program.namespace import contiguous, reshape
from xformer.backends.numba.program.native import Native, float32s, native, numbers, part, words
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.traced import constant
from xformer.backends.numba.registers import HIGH
from xformer.backends.numba.tuning import SPEED
from xformer.checks import require_gradient
from xformer.dispatch import is_inference, kernel
from xformer.showing import short
from xformer.typing import Array

CHUNK = 1 << 24  # logits at once, to the nearest number of chunks: 64 MB
LOGITS = 1 << 19  # of a thread at once: near a core
ROWS = 384  # of a thread at once at least, however many classes: weights are read for each


def unsupported(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    trainable: bool = True,
) -> str | None:
    """Why the kernel cannot run."""
    arrays = [x, w] if b is None else [x, w, b]
    if any(array.dtype != np.float32 for array in arrays) or w.shape[1] == 0:
        return "only float32, and at least one class"
    if reduction == "none":
        return 'reduction "none" has a dloss for each token'
    if program.of([*arrays, targets]) is None:
        return "all arrays are constants"
    return no_products()


@kernel(ops.linear_cross_entropy, "numba.kernels", unsupported=unsupported)
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    trainable: bool = True,
) -> tuple[Array, LinearCrossEntropyCache | None]:
    """The loss, and its gradients unless within `inference()`."""
    options = checked(label_smoothing, z_loss, reduction, ignore_index)
    recorder = program.of([x, w, b, targets])
    assert recorder is not None  # else this were unsupported
    tokens = tokens_of(recorder, w, targets, options)
    rows = contiguous(rows_of(x))
    if ignore_index is not None:  # 0 times NaN would be NaN in dw
        counts: Array = reshape(tokens.targets, (-1, 1))
        rows = namespace.where(counts >= 0, rows, 0.0)
    head = _Head(recorder, rows, factor(w), b, options)
    back = not is_inference()
    losses = recorder.fresh((head.x.shape[0],), np.float32)
    dx = recorder.fresh(head.x.shape if back else (0,), np.float32)
    dw = db = None
    for at in _chunks(head.x.shape[0], w.shape[1]):
        dlogits = head.differentiate(tokens, at, losses, dx, back=back)
        if back and trainable:
            dw = weight_gradient(recorder, head.x[at], w, dlogits, dw)
        if back and b is not None:
            db = column_sums(recorder, dlogits, db)
    loss = total(recorder, losses, tokens.weight)
    cache = LinearCrossEntropyCache(reshape(dx, x.shape), dw, db) if back else None
    return loss, cache


@short
class LinearCrossEntropyCache(NamedTuple):
    """Saved by `linear_cross_entropy` for backward: gradients for dloss = 1."""

    dx: Array  # (..., D)
    dw: Array | None  # (D, V); None: w is not trained
    db: Array | None  # (V,)

    def backward(self, dloss: Array | None = None) -> tuple[Array, Array | None, Array | None]:
        """Times dloss; as they are where that is known to be 1."""
        dloss = constant(np.ones((), np.float32)) if dloss is None else dloss
        require_gradient("linear_cross_entropy", "dloss", dloss, self.dx, ())
        if dloss.is_constant and dloss == 1:
            return self.dx, self.dw, self.db
        dx, dw, db = (None if grad is None else grad * dloss for grad in self)
        return dx, dw, db


def _chunks(n: int, n_classes: int) -> list[slice]:
    """Rows of about `CHUNK` logits; one chunk where there is no row."""
    size = max(1, -(-n // max(1, round(n * n_classes / CHUNK))))
    return [slice(start, min(start + size, n)) for start in range(0, max(n, 1), size)]


class _Head(NamedTuple):
    """What stands on top of a language model, and its options."""

    recorder: Program
    x: Array  # (N, D), of contiguous rows
    w: Array  # (D, V)
    b: Array | None
    options: Options

    def differentiate(
        self, tokens: Tokens, at: slice, losses: Array, dx: Array, *, back: bool
    ) -> Array:
        """dlogits of some rows; their losses, and with `back` their part of dx."""
        recorder, x, w, b, options = self.recorder, self.x[at], self.w, self.b, self.options
        (n, d), n_classes = x.shape, w.shape[1]
        dlogits = recorder.fresh((n, n_classes), np.float32)

        def run(
            losses: Any,
            dx: Any,
            dlogits: Any,
            x: Any,
            w: Any,
            targets: Any,
            weight: Any,
            b: Any = 0,
        ) -> None:
            losses[...], cache = options.of_each(x @ w + b, targets)
            dlogits[...] = cache.backward(np.full_like(losses, weight[0]))
            if back:
                np.matmul(dlogits, w.T, out=dx)

        layout = steps(w)
        assert layout is not None  # after `factor`
        outs = losses[at], dx[at] if back else dx, dlogits
        ins = [x, w, tokens.targets[at], tokens.weight] + ([] if b is None else [contiguous(b)])
        near = max(ROWS, LOGITS // n_classes)
        own = n, d, n_classes, *layout, int(b is not None), int(back), near, *options.words()
        pieces = recorder.pieces(n * d * n_classes // SPEED)
        recorder.emit(
            "linear loss", run, outs, ins, Native(differentiate_map, own, pieces, blas=True)
        )
        return dlogits


@native
def differentiate_map(args: int, piece: int, pieces: int, memory: int) -> None:
    """losses, dx, dlogits; x, w, targets, weight, b where there is one.

    N, D, V, bytes from row to row and column to column of w, whether there is b, and dx, how many
    rows at once, label smoothing, z loss.
    """
    at, a = words(args, 8), numbers(args, 10)
    n, d, v, down, across, has_b, back = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
    own = numbers_of(a[8], a[9], float32s(at[6], (1,))[0])
    start, stop = part(n, piece, pieces, HIGH)
    for first in range(start, stop, a[7]):
        rows = min(a[7], stop - first)
        x, logits = (at[3] + 4 * first * d, 4 * d, 4), at[2] + 4 * first * v
        product(memory, x, (at[4], down, across), False, (logits, 4 * v), (rows, v, d))
        if has_b:
            add_bias(at[7], (logits, 4 * v), (rows, v))
        targets, losses = words(at[5] + 8 * first, rows), float32s(at[0] + 4 * first, (rows,))
        differentiate(float32s(logits, (rows, v)), targets, own, losses)
        if back:
            dx, w = (at[1] + 4 * first * d, 4 * d), (at[4], across, down)
            product(memory, (logits, 4 * v, 4), w, False, dx, (rows, d, v))
