"""`linear_cross_entropy` in chunks of rows: of all logits, those of one chunk are there at a time.

They become their own gradient in place, and that its share of dx, dw and db, before the next chunk
overwrites it. A backward has nothing left to do but to multiply by dloss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from xformer.backends.numpy.cross_entropy import Tokens, less, slopes
from xformer.backends.numpy.ids import private
from xformer.backends.numpy.products import product
from xformer.backends.numpy.rows import row_blocks
from xformer.backends.numpy.threads import run, scratch
from xformer.checks import finite, number, require_gradient
from xformer.dispatch import is_inference, kernel
from xformer.ops._loss import one
from xformer.ops.cross_entropy import require_options, split_ignored
from xformer.ops.linear_cross_entropy import linear_cross_entropy as reference
from xformer.showing import short
from xformer.typing import Array

CHUNK = 1 << 24  # logits, to the nearest number of chunks: 64 MB, rows enough for fast products
LARGE = 1 << 12  # V; with fewer classes the logits are a small part of what a model keeps
STEP = 1024  # rows or columns of a piece of a product, however many threads there are
# Of the logits of some rows, and which they are: keeps what the loss needs, and has their gradients
# take their place where those are wanted.
Differentiate = Callable[[Array, slice], None]


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
    if w.shape[1] < LARGE:  # whatever N is: `measure` finds from few tokens what many would keep
        return f"there are fewer than {LARGE} classes"
    return 'reduction "none" has a dloss for each token' if reduction == "none" else None


@kernel(reference, "numpy", unsupported=unsupported)
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
    """The loss, and its gradients unless within `inference()`. Ignored tokens are left out."""
    a = number("cross_entropy", "label_smoothing", label_smoothing, low=0, high=1)
    z = finite("cross_entropy", "z_loss", z_loss)
    require_options(ignore_index, reduction)
    xs, targets, chosen = kept_rows(x, w, private(targets), ignore_index)
    weight = 1 / max(len(xs), 1) if reduction == "mean" else 1.0
    tokens, back = Tokens.of(targets, x.dtype, a, z), not is_inference()

    def differentiate(logits: Array, at: slice) -> None:
        tokens.read(logits, at, logits)
        if back:
            slope = weight * slopes(tokens.top[at], tokens.total[at], z)
            logits *= slope[:, None]
            less(logits, tokens.targets[at], np.full_like(slope, weight), a)

    grads = in_chunks(xs, w, b, differentiate, back=back, trainable=trainable)
    loss = np.add.reduce(tokens.losses()) * xs.dtype.type(weight)
    return loss, cache_of(grads, x.shape, chosen)


def in_chunks(
    x: Array,
    w: Array,
    b: Array | None,
    differentiate: Differentiate,
    *,
    back: bool,
    trainable: bool,
) -> Gradients | None:
    """`differentiate` all rows, on all threads; with `back` what their gradients add up to."""
    n, grads = len(x), Gradients.of(x, w, b, trainable) if back else None
    size = max(1, -(-n // max(1, round(n * w.shape[1] / CHUNK))))
    for start in range(0, max(n, 1), size):  # once where there is no row
        _chunk(x, w, b, slice(start, min(start + size, n)), differentiate, grads)
    return grads


def kept_rows(
    x: Array, w: Array, targets: Array, ignore_index: int | None
) -> tuple[Array, Array, Array | None]:
    """Rows and targets that are not ignored, and which they are; None: all."""
    targets, kept = split_ignored(w, targets, ignore_index)
    xs, targets = x.reshape(targets.size, x.shape[-1]), targets.reshape(-1)
    if kept is None or kept.all():
        return xs, targets, None
    chosen = np.flatnonzero(kept)
    return xs[chosen], targets[chosen], chosen


@short
class LinearCrossEntropyCache(NamedTuple):
    """Saved by `linear_cross_entropy` for backward: gradients for dloss = 1."""

    dx: Array  # (..., D)
    dw: Array | None  # (D, V); None: w is not trained
    db: Array | None  # (V,)

    def backward(self, dloss: Array | None = None) -> tuple[Array, Array | None, Array | None]:
        """Times dloss; as they are where that is 1, as it is of a loss that nothing follows."""
        dloss = one(self.dx) if dloss is None else dloss
        require_gradient("linear_cross_entropy", "dloss", dloss, self.dx, ())
        if dloss == 1:
            return self.dx, self.dw, self.db
        dx, dw, db = (None if grad is None else grad * dloss for grad in self)
        return dx, dw, db


class Gradients(NamedTuple):
    """For dloss = 1, of the tokens that are not ignored."""

    dx: Array  # (N, D)
    dw: Array | None  # (D, V), as w lies in memory: a tied head's lies sideways
    db: Array | None  # (V,)

    @staticmethod
    def of(x: Array, w: Array, b: Array | None, trainable: bool) -> Gradients:
        """Nothing yet."""
        return Gradients(
            np.empty(x.shape, x.dtype),
            np.empty_like(w) if trainable else None,
            None if b is None else np.empty_like(b),
        )

    def add(self, x: Array, w: Array, dlogits: Array, at: slice) -> None:
        """What a chunk of rows adds; the first one is what is there."""
        # Each of these sums over all of V and takes the longest, so that they come first.
        pieces = product(dlogits, w.T, self.dx[at], step=STEP // 4)
        add = at.start > 0
        if self.dw is not None:
            dw, own = self.dw, (x[at].T, dlogits)
            if not dw.flags.c_contiguous:
                dw, own = dw.T, (dlogits.T, x[at])
            pieces += product(*own, dw, add=add, step=STEP)
        if self.db is not None:
            ones = np.ones((1, len(dlogits)), dlogits.dtype)
            pieces += product(ones, dlogits, self.db[None], add=add, step=8 * STEP)
        run(pieces)


def _chunk(
    x: Array,
    w: Array,
    b: Array | None,
    at: slice,
    differentiate: Differentiate,
    grads: Gradients | None,
) -> None:
    """These rows: their logits, which become dlogits."""
    logits = scratch("logits", (at.stop - at.start, w.shape[1]), x.dtype)
    run(product(x[at], w, logits, b, step=STEP))

    def piece(start: int, stop: int) -> None:
        differentiate(logits[start:stop], slice(at.start + start, at.start + stop))

    row_blocks(piece, *logits.shape)
    if grads is not None:
        grads.add(x, w, logits, at)


def cache_of(
    grads: Gradients | None, shape: tuple[int, ...], chosen: Array | None
) -> LinearCrossEntropyCache | None:
    """With zeros for the tokens that were left out."""
    if grads is None:
        return None
    dx = grads.dx
    if chosen is not None:
        dx = np.zeros((math.prod(shape[:-1]), shape[-1]), dx.dtype)
        dx[chosen] = grads.dx
    return LinearCrossEntropyCache(dx.reshape(shape), grads.dw, grads.db)
