"""`linear_cross_entropy` in chunks of rows: only one chunk of logits is in memory at a time.

The forward replaces a chunk of logits by its gradient, and adds the chunk's part of dx, dw and db.
The backward only multiplies these by dloss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numpy.cross_entropy import Tokens, exp_factor, subtract_targets
from xformer.backends.numpy.ids import private_copy
from xformer.backends.numpy.products import product
from xformer.backends.numpy.rows import row_blocks
from xformer.backends.numpy.threads import run, scratch
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import is_inference, kernel
from xformer.dispatch.checks import require_gradient
from xformer.ops._loss import loss_options, one
from xformer.ops.cross_entropy import split_ignored
from xformer.ops.linear_cross_entropy import linear_cross_entropy as reference

CHUNK = 1 << 24  # logits of a chunk, about: 64 MB, with enough rows for fast products
LARGE = 1 << 12  # V; with fewer classes the logits are a small part of a model's saved arrays
STEP = 1024  # rows or columns of a piece of a product, for any number of threads
# differentiate(logits, rows): store what the loss needs of the logits of these rows, and replace
# them by their gradients if gradients are wanted.
Differentiate = Callable[[Array, slice], None]


def unsupported(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    trainable: bool = True,
    **options: Any,
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    if w.shape[1] < LARGE:  # whatever N is, because `measure` extrapolates from few tokens
        return f"there are fewer than {LARGE} classes"
    return (
        'reduction "none" has a dloss for each token'
        if options.get("reduction") == "none"
        else None
    )


@kernel(reference, "numpy", unsupported=unsupported)
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    trainable: bool = True,
    **options: Any,
) -> tuple[Array, NumpyLinearCrossEntropyCache | None]:
    """Compute the loss of the tokens that are not ignored, and its gradients.

    Within `inference()` no gradients are computed, and the cache is None.
    """
    ignore_index, a, z, reduction = loss_options(**options)
    xs, targets, chosen = kept_rows(x, w, private_copy(targets), ignore_index)
    weight = 1 / max(len(xs), 1) if reduction == "mean" else 1.0
    tokens, with_gradients = Tokens.empty(targets, x.dtype, a, z), not is_inference()

    def differentiate(logits: Array, span: slice) -> None:
        tokens.read(logits, span, logits)
        if with_gradients:
            factor = weight * exp_factor(tokens.top[span], tokens.total[span], z)
            logits *= factor[:, None]
            subtract_targets(logits, tokens.targets[span], np.full_like(factor, weight), a)

    grads = in_chunks(xs, w, b, differentiate, with_gradients=with_gradients, trainable=trainable)
    loss = np.add.reduce(tokens.losses()) * xs.dtype.type(weight)
    return loss, cache_of(grads, x.shape, chosen)


def in_chunks(
    x: Array,
    w: Array,
    b: Array | None,
    differentiate: Differentiate,
    *,
    with_gradients: bool,
    trainable: bool,
) -> Gradients | None:
    """Call `differentiate` for the logits of all rows x (N, D), chunk by chunk, on all threads.

    Return the gradients if they are wanted, else None.
    """
    n, grads = len(x), Gradients.empty(x, w, b, trainable) if with_gradients else None
    size = max(1, -(-n // max(1, round(n * w.shape[1] / CHUNK))))
    for start in range(0, max(n, 1), size):  # once if there is no row, to set dw and db
        _chunk(x, w, b, slice(start, min(start + size, n)), differentiate, grads)
    return grads


def kept_rows(
    x: Array, w: Array, targets: Array, ignore_index: int | None
) -> tuple[Array, Array, Array | None]:
    """Return the rows (N, D) and targets (N,) that are not ignored, and their indices or None.

    The indices are None if nothing is ignored.
    """
    targets, keep = split_ignored(w, targets, ignore_index)
    xs, targets = x.reshape(targets.size, x.shape[-1]), targets.reshape(-1)
    if keep is None or keep.all():
        return xs, targets, None
    chosen = np.flatnonzero(keep)
    return xs[chosen], targets[chosen], chosen


@short
class NumpyLinearCrossEntropyCache(NamedTuple):
    """Saved by `linear_cross_entropy` for backward: gradients for dloss = 1."""

    dx: Array  # (..., D)
    dw: Array | None  # (D, V); None: w is not trained
    db: Array | None  # (V,)

    def backward(self, dloss: Array | None = None) -> tuple[Array, Array | None, Array | None]:
        """Return the saved gradients times dloss: the saved arrays themselves if dloss is 1."""
        dloss = one(self.dx) if dloss is None else dloss
        require_gradient("linear_cross_entropy", "dloss", dloss, self.dx, ())
        if dloss == 1:
            return self.dx, self.dw, self.db
        dx, dw, db = (None if grad is None else grad * dloss for grad in self)
        return dx, dw, db


class Gradients(NamedTuple):
    """The gradients for dloss = 1, of the tokens that are not ignored."""

    dx: Array  # (N, D)
    dw: Array | None  # (D, V), in the memory order of w: Fortran order for a tied head
    db: Array | None  # (V,)

    @staticmethod
    def empty(x: Array, w: Array, b: Array | None, trainable: bool) -> Gradients:
        """Return uninitialised arrays. `add` of the first chunk overwrites them."""
        return Gradients(
            np.empty(x.shape, x.dtype),
            np.empty_like(w) if trainable else None,
            None if b is None else np.empty_like(b),
        )

    def add(self, x: Array, w: Array, dlogits: Array, span: slice) -> None:
        """Write dx of the rows `span`; add their part of dw and db. Row 0 overwrites dw and db."""
        # The pieces of dx sum over V and take longest, so they are first.
        pieces = product(dlogits, w.T, self.dx[span], step=STEP // 4)
        add = span.start > 0
        if self.dw is not None:
            dw, factors = self.dw, (x[span].T, dlogits)
            if not dw.flags.c_contiguous:
                dw, factors = dw.T, (dlogits.T, x[span])
            pieces += product(*factors, dw, add=add, step=STEP)
        if self.db is not None:
            ones = np.ones((1, len(dlogits)), dlogits.dtype)
            pieces += product(ones, dlogits, self.db[None], add=add, step=8 * STEP)
        run(pieces)


def _chunk(
    x: Array,
    w: Array,
    b: Array | None,
    span: slice,
    differentiate: Differentiate,
    grads: Gradients | None,
) -> None:
    """Compute the logits of the rows `span`, differentiate them, and add to the gradients."""
    logits = scratch("logits", (span.stop - span.start, w.shape[1]), x.dtype)
    run(product(x[span], w, logits, b, step=STEP))

    def piece(start: int, stop: int) -> None:
        differentiate(logits[start:stop], slice(span.start + start, span.start + stop))

    row_blocks(piece, *logits.shape)
    if grads is not None:
        grads.add(x, w, logits, span)


def cache_of(
    grads: Gradients | None, shape: tuple[int, ...], chosen: Array | None
) -> NumpyLinearCrossEntropyCache | None:
    """Return the cache, with dx in the given shape (..., D), and 0 in dx for ignored tokens."""
    if grads is None:
        return None
    dx = grads.dx
    if chosen is not None:
        dx = np.zeros((math.prod(shape[:-1]), shape[-1]), dx.dtype)
        dx[chosen] = grads.dx
    return NumpyLinearCrossEntropyCache(dx.reshape(shape), grads.dw, grads.db)
