"""`linear_cross_entropy` in chunks of rows: memory holds the logits of one chunk at a time.

One launch writes the losses of a chunk, and over its logits their gradient, of the sum of the
losses. Products make its share of dx, dw and db of it before the next chunk overwrites it. A
backward multiplies them by a factor, which stays on the device: dloss, over the number of tokens
where the loss is their mean.

Products are fast where rows begin, and matrices end, at multiples of 128 bytes. So w, and b, are
copied once with zeros behind the last class (`row_width`). The logits there are not looked at, and
their gradient is 0, whatever x and w hold.
"""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace

from xformer.backends.cupy.cross_entropy import int64_targets, token_losses, total_loss
from xformer.backends.cupy.module import blocks, empty
from xformer.backends.cupy.products import NONE, Gradients, Products
from xformer.checks import finite, number, require_gradient
from xformer.dispatch import is_inference, kernel
from xformer.ops._loss import one
from xformer.ops.cross_entropy import require_options
from xformer.ops.linear_cross_entropy import linear_cross_entropy as reference
from xformer.shapes import STORED, working_dtype
from xformer.showing import short
from xformer.typing import Array

CHUNK = 1 << 29  # bytes of logits, to the nearest number of chunks: few sums of dw
ROWS = 256  # of a chunk a multiple, as of the tiles of products; with fewer w is not copied
COLUMNS = 64  # of a row of logits a multiple, if that is little more
LARGE = 1 << 12  # V; with fewer classes the logits are a small part of what a model keeps


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
    fixed: bool = False,
) -> str | None:
    """Why the kernel cannot run."""
    if w.shape[1] < LARGE and w.dtype.name not in STORED:
        return f"there are fewer than {LARGE} classes"
    return 'reduction "none" has a dloss for each token' if reduction == "none" else None


@kernel(reference, "cupy", unsupported=unsupported, storage_dtypes=STORED)
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
    fixed: bool = False,
) -> tuple[Array, LinearCrossEntropyCache | None]:
    """The loss, and its gradients unless within `inference()`."""
    options = Options(targets, ignore_index, label_smoothing, z_loss, reduction)
    return forward(Products(), x, w, b, options, fixed)


class Options(NamedTuple):
    """Those of the loss."""

    targets: Array
    ignore_index: int | None
    label_smoothing: float
    z_loss: float
    reduction: str


def forward(
    products: Products, x: Array, w: Array, b: Array | None, options: Options, fixed: bool
) -> tuple[Array, LinearCrossEntropyCache | None]:
    """`linear_cross_entropy` by some library's products."""
    targets, ignore_index, label_smoothing, z_loss, reduction = options
    a = number("cross_entropy", "label_smoothing", label_smoothing, low=0, high=1)
    z = finite("cross_entropy", "z_loss", z_loss)
    require_options(ignore_index, reduction)
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
    for start in range(0, max(n, 1), size):  # once where there is no row
        at = slice(start, min(start + size, n))
        logits = products.affine(xs[at, :], w, b, buffer[: at.stop - at.start, :])
        slopes = None if dx is None else logits  # which they overwrite
        own = loss[at], (None, None), ignore_index, a, z
        token_losses(logits, targets[at], *own, n_classes=n_classes, dlogits=slopes)
        if dx is not None:
            products.back(logits, w, dx[at, :])
            rows = None if fixed else xs[at, :]
            grads = products.parameters(rows, logits, w, b is not None, grads)
    total, scale = total_loss(loss, targets, ignore_index, reduction)
    if dx is None:
        return total, None
    dx = array_namespace(x).reshape(dx, x.shape)
    return total, LinearCrossEntropyCache(dx, *of_classes(grads, n_classes), scale)


def chunk_rows(n: int, row_bytes: int) -> int:
    """Rows of each chunk but the last, at least one."""
    size = max(1, blocks(n, max(1, round(n * row_bytes / CHUNK))))
    return size if size < ROWS else min(n, blocks(size, ROWS) * ROWS)


def row_width(n_classes: int) -> int:
    """Columns of a row of logits: the classes, and up to 12.5 % more for whole packs and tiles."""
    step = COLUMNS if n_classes >= 8 * COLUMNS else 8
    return blocks(n_classes, step) * step


def padded(x: Array, width: int) -> Array:
    """x (..., V) with zeros behind the last axis: (..., width), by columns if x is."""
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
    """The gradients without what `padded` added."""
    dw, db = grads
    dw = dw if dw is None or dw.shape[1] == n_classes else dw[:, :n_classes]
    return Gradients(dw, db if db is None else db[:n_classes])


@short
class LinearCrossEntropyCache(NamedTuple):
    """Saved by `linear_cross_entropy` for backward: gradients of the sum over tokens."""

    dx: Array  # (..., D)
    dw: Array | None  # (D, V); None: w is not trained
    db: Array | None  # (V,)
    scale: Array  # (): 1, or 1 / number of tokens

    def backward(self, dloss: Array | None = None) -> tuple[Array, Array | None, Array | None]:
        """Times dloss and scale."""
        dloss = one(self.scale) if dloss is None else dloss
        require_gradient("linear_cross_entropy", "dloss", dloss, self.scale, ())
        factor = dloss * self.scale
        dx, dw, db = (None if grad is None else _times(grad, factor) for grad in self[:3])
        return dx, dw, db


def _times(grad: Array, factor: Array) -> Array:
    """grad * factor, with the layout of grad, rounded once if grad is stored in less than factor.

    By rows: of a matrix by columns, as a tied head's dw, CuPy would transpose what it computes.
    """
    if grad.ndim == 2 and grad.flags.f_contiguous and not grad.flags.c_contiguous:
        return _times(grad.T, factor).T
    xp = array_namespace(grad)
    product = xp.astype(grad, factor.dtype, copy=False) * factor
    return xp.astype(product, grad.dtype, copy=False)
