"""`linear_cross_entropy` in chunks of rows: memory holds the logits of one chunk at a time.

One launch writes the losses of a chunk. It overwrites the logits by the gradient of the sum of the
losses. Matmuls then compute the chunk's share of dx, dw and db, before the next chunk overwrites
the gradient. Backward multiplies dx, dw and db by a factor that stays on the device: dloss, divided
by the number of tokens if the loss is their mean.

Matmuls are fast if rows begin, and matrices end, at multiples of 128 bytes. So w and b are copied
once, with columns of zeros after the last class (`row_width`). The kernel ignores the logits of
these columns; their gradient is 0, whatever x and w hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.backends.cupy.cross_entropy import int64_targets, token_losses, total_loss
from xformer.backends.cupy.module import blocks, empty
from xformer.backends.cupy.products import NONE, Gradients, Products
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import is_inference, kernel
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import STORED, working_dtype
from xformer.ops._loss import LossOptions, loss_options, one
from xformer.ops.linear_cross_entropy import linear_cross_entropy as reference

CHUNK = 1 << 29  # bytes of a chunk of logits, rounded; so large that dw has few sums
ROWS = 256  # a chunk has a multiple of it, as tiles of matmuls; with fewer rows w is not copied
COLUMNS = 64  # a row of logits has a multiple of it, if that is at most 12.5 % more
LARGE = 1 << 12  # V; with fewer classes logits are a small part of the memory of training


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
    if w.shape[1] < LARGE and w.dtype.name not in STORED:
        return f"there are fewer than {LARGE} classes"
    return (
        'reduction "none" has a dloss for each token'
        if options.get("reduction") == "none"
        else None
    )


@kernel(reference, "cupy", unsupported=unsupported, storage_dtypes=STORED)
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    targets: Array,
    trainable: bool = True,
    **options: Any,
) -> tuple[Array, CupyLinearCrossEntropyCache | None]:
    """Return (loss, cache). The cache holds the gradients; it is None within `inference()`.

    x: (..., D)   w: (D, V)   b: (V,)   targets: (...), integers
    trainable: whether w is trained
    """
    return forward(Products(), x, w, b, targets, loss_options(**options), trainable)


def forward(
    products: Products,
    x: Array,
    w: Array,
    b: Array | None,
    targets: Array,
    options: LossOptions,
    trainable: bool,
) -> tuple[Array, CupyLinearCrossEntropyCache | None]:
    """Return (loss, cache) of `linear_cross_entropy`, by the matmuls of `products`."""
    ignore_index, a, z, reduction = options
    targets = array_namespace(w).reshape(int64_targets(w, targets), (-1,))
    xs, n_classes = products.rows(x), w.shape[1]
    n = xs.shape[0]
    width = row_width(n_classes) if n >= ROWS else n_classes
    w = products.matrix(w) if width == n_classes else padded(w, width)
    b = b if b is None or width == n_classes else padded(b, width)
    loss = empty(xs, (n,), working_dtype(xs))
    dx, grads = None if is_inference() else empty(xs), NONE
    size = chunk_rows(n, width * xs.dtype.itemsize)
    buffer = empty(xs, (size, width))
    for start in range(0, max(n, 1), size):  # once if there is no row
        at = slice(start, min(start + size, n))
        logits = products.affine(xs[at, :], w, b, buffer[: at.stop - at.start, :])
        dlogits = None if dx is None else logits  # the gradient overwrites the logits
        arguments = loss[at], (None, None), ignore_index, a, z
        token_losses(logits, targets[at], *arguments, n_classes=n_classes, dlogits=dlogits)
        if dx is not None:
            products.back(logits, w, dx[at, :])
            rows = xs[at, :] if trainable else None
            grads = products.parameters(rows, logits, w, b is not None, grads)
    total, scale = total_loss(loss, targets, ignore_index, reduction)
    if dx is None:
        return total, None
    dx = array_namespace(x).reshape(dx, x.shape)
    return total, CupyLinearCrossEntropyCache(dx, *of_classes(grads, n_classes), scale)


def chunk_rows(n: int, row_bytes: int) -> int:
    """Return the rows of each chunk except the last; at least one.

    n: rows of all chunks   row_bytes: bytes of a row of logits
    """
    size = max(1, blocks(n, max(1, round(n * row_bytes / CHUNK))))
    return size if size < ROWS else min(n, blocks(size, ROWS) * ROWS)


def row_width(n_classes: int) -> int:
    """Return the columns of a row of logits: the classes, and padding to whole packs or tiles.

    The padding to a multiple of `COLUMNS` is at most 12.5 %; with few classes it is to 8.
    """
    step = COLUMNS if n_classes >= 8 * COLUMNS else 8
    return blocks(n_classes, step) * step


def padded(x: Array, width: int) -> Array:
    """Return a copy of x (..., V) with zeros appended: (..., width). It is by columns if x is."""
    if x.ndim == 2 and x.strides[0] < x.strides[1]:
        held = empty(x, (width, x.shape[0]))
        held[: x.shape[1], :] = x.T
        held[x.shape[1] :, :] = 0
        return held.T
    held = empty(x, (*x.shape[:-1], width))
    held[..., : x.shape[-1]] = x
    held[..., x.shape[-1] :] = 0
    return held


def of_classes(grads: Gradients, n_classes: int) -> Gradients:
    """Return the gradients without the columns that `padded` added."""
    dw, db = grads
    dw = dw if dw is None or dw.shape[1] == n_classes else dw[:, :n_classes]
    return Gradients(dw, db if db is None else db[:n_classes])


@short
class CupyLinearCrossEntropyCache(NamedTuple):
    """Saved by `linear_cross_entropy` for backward: gradients of the sum over tokens."""

    dx: Array  # (..., D)
    dw: Array | None  # (D, V); None: w is not trained
    db: Array | None  # (V,)
    scale: Array  # (): 1, or 1 / number of tokens

    def backward(self, dloss: Array | None = None) -> tuple[Array, Array | None, Array | None]:
        """Return dx, dw and db: the saved gradients times dloss and scale; dloss None: 1."""
        dloss = one(self.scale) if dloss is None else dloss
        require_gradient("linear_cross_entropy", "dloss", dloss, self.scale, ())
        factor = dloss * self.scale
        dx, dw, db = (None if grad is None else _times(grad, factor) for grad in self[:3])
        return dx, dw, db


def _times(grad: Array, factor: Array) -> Array:
    """Return grad * factor with the layout and dtype of grad, rounded once.

    A matrix by columns, as dw of a tied head, is multiplied as its transpose: CuPy would return the
    product by rows.
    """
    if grad.ndim == 2 and grad.flags.f_contiguous and not grad.flags.c_contiguous:
        return _times(grad.T, factor).T
    xp = array_namespace(grad)
    product = xp.astype(grad, factor.dtype, copy=False) * factor
    return xp.astype(product, grad.dtype, copy=False)
