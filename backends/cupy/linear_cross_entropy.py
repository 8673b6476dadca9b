"""`linear_cross_entropy` in chunks of rows: of all logits, those of one chunk are there at a time.

They become their own gradient in place, and that its share of dx, dw and db, before the next chunk
overwrites it: for the sum of the losses. What is left to a backward is a factor, which stays on the
device: dloss, over the number of tokens where the loss is their mean.
"""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace
from xformer.backends.cupy.cross_entropy import (
    CrossEntropyCache,
    dlogits,
    int64_targets,
    token_losses,
    total_loss,
)
from xformer.backends.cupy.module import empty
from xformer.backends.cupy.products import NONE, Products

from xformer.checks import finite, number, require_gradient
from xformer.dispatch import keeps_nothing, kernel
from xformer.ops.cross_entropy import require_options
from xformer.ops.linear_cross_entropy import linear_cross_entropy as reference
from xformer.shapes import STORED, working_dtype
from xformer.typing import Array

CHUNK = 1 << 27  # logits, to the nearest number of chunks: 512 MB, and few sums of dw
LARGE = 1 << 12  # V; with fewer classes the logits are a small part of what a model keeps


def too_small(
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


@kernel(reference, "cupy", unsupported=too_small, stores=STORED)
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
    xs, w = products.rows(x), products.matrix(w)
    n, n_classes = xs.shape[0], w.shape[1]
    real = working_dtype(xs)
    loss, top, sums = (empty(xs, (n,), real) for _ in range(3))
    one = array_namespace(xs).ones((), dtype=real, device=xs.device)
    dx, grads = None if keeps_nothing() else empty(xs), NONE
    size = max(1, -(-n // max(1, round(n * n_classes / CHUNK))))
    buffer = empty(xs, (min(size, n), n_classes))
    for start in range(0, max(n, 1), size):  # once where there is no row
        at = slice(start, min(start + size, n))
        logits = products.affine(xs[at, :], w, b, buffer[: at.stop - at.start, :])
        known = top[at], sums[at]
        token_losses(logits, targets[at], loss[at], *known, ignore_index, a, z)
        if dx is not None:
            cache = CrossEntropyCache(logits, targets[at], ignore_index, *known, one, a, z)
            slopes = dlogits(cache, one, logits)  # in place of the logits
            products.back(slopes, w, dx[at, :])
            own = None if fixed else xs[at, :]
            grads = products.parameters(own, slopes, w, b is not None, grads)
    total, scale = total_loss(loss, targets, ignore_index, reduction)
    if dx is None:
        return total, None
    dx = array_namespace(x).reshape(dx, x.shape)
    return total, LinearCrossEntropyCache(dx, *grads, scale)


class LinearCrossEntropyCache(NamedTuple):
    """What `linear_cross_entropy` keeps for its backward: gradients of the sum over tokens."""

    dx: Array  # (..., D)
    dw: Array | None  # (D, V); None: w is not trained
    db: Array | None  # (V,)
    scale: Array  # (): 1, or 1 / number of tokens

    def backward(self, dloss: Array) -> tuple[Array, Array | None, Array | None]:
        """Times dloss and scale."""
        require_gradient("linear_cross_entropy", "dloss", dloss, self.scale, ())
        factor = dloss * self.scale
        dx, dw, db = (None if grad is None else _times(grad, factor) for grad in self[:3])
        return dx, dw, db


def _times(grad: Array, factor: Array) -> Array:
    """grad * factor, rounded once where grad is stored in less than factor."""
    xp = array_namespace(grad)
    product = xp.astype(grad, factor.dtype, copy=False) * factor
    return xp.astype(product, grad.dtype, copy=False)
