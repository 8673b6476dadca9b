"""`cross_entropy`: one block a token. The mean does not bring the number of tokens to the host."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.backends.cupy.module import EVERY, Source, contiguous, empty, launch, threads, wide
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_axis, require_gradient, require_integers
from xformer.dispatch.shapes import STORED, working_dtype
from xformer.ops._loss import loss_options, one
from xformer.ops.cross_entropy import cross_entropy as reference

SOURCE = Source(__file__, dtypes=EVERY, WIDE=(0, 1))
MAX_THREADS = 1024


@kernel(reference, "cupy", storage_dtypes=STORED)
def cross_entropy(
    logits: Array,
    *,
    targets: Array,
    **options: Any,
) -> tuple[Array, CupyCrossEntropyCache]:
    """Return (loss, cache): one launch for the tokens' losses, another for their sum or mean.

    logits: (..., V)
    targets: (...), integers
    """
    ignore_index, label_smoothing, z_loss, reduction = loss_options(**options)
    require_axis("cross_entropy", logits, -1, "logits")
    logits = contiguous(logits)
    targets = int64_targets(logits, targets)
    loss, top, total = (empty(logits, targets.shape, working_dtype(logits)) for _ in range(3))
    token_losses(logits, targets, loss, (top, total), ignore_index, label_smoothing, z_loss)
    scale = None
    if reduction != "none":
        loss, scale = total_loss(loss, targets, ignore_index, reduction)
    statistics = top, total, scale
    return loss, CupyCrossEntropyCache(
        logits, targets, ignore_index, *statistics, label_smoothing, z_loss
    )


@short
class CupyCrossEntropyCache(NamedTuple):
    """Saved by `cross_entropy` for backward; probabilities are recomputed from top."""

    logits: Array  # (..., V)
    targets: Array  # (...), int64
    ignore_index: int | None
    top: Array  # (...), max(logits); 0 for ignored tokens
    total: Array  # (...), sum(exp(logits - top)); 0 for ignored tokens
    scale: Array | None  # (): 1, or 1 / number of tokens; None for reduction "none"
    label_smoothing: float
    z_loss: float

    def backward(self, dloss: Array | None = None) -> Array:
        """Return dlogits (..., V).

        dloss: the gradient of the loss, (), or (...) for reduction "none"; None: 1
        """
        dloss = one(self.logits) if dloss is None else dloss
        shape = self.top.shape if self.scale is None else ()
        require_gradient("cross_entropy", "dloss", dloss, self.top, shape)
        return dlogits(self, dloss, empty(self.logits))


def int64_targets(logits: Array, targets: Array) -> Array:
    """Return the targets (...) as contiguous int64, which the kernels read."""
    targets = require_integers("cross_entropy", "targets", targets, logits)
    xp = array_namespace(targets)
    return contiguous(xp.astype(targets, xp.int64, copy=False))


def token_losses(
    logits: Array,
    targets: Array,
    loss: Array,
    saved: tuple[Array | None, Array | None],
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    *,
    n_classes: int | None = None,
    dlogits: Array | None = None,
) -> None:
    """Write the loss of each token to `loss` (...). All arrays are contiguous.

    logits: (..., step)
    saved: top and total (...), written for a backward, or None
    n_classes: the first columns of the logits that are classes; None: all
    dlogits: (..., step), written: the gradient of the sum of the losses; may be `logits`
    Raises ValueError if the shapes do not fit.
    """
    step = logits.shape[-1]
    width = step if n_classes is None else n_classes
    if not 0 < width <= step or (dlogits is not None and dlogits.shape != logits.shape):
        raise ValueError(f"token_losses: {width} classes do not fit into logits {logits.shape}")
    options = (*_ignored(ignore_index), label_smoothing, z_loss)
    by_packs = wide(step, logits, dlogits)
    launch(
        SOURCE,
        "cross_entropy_forward",
        logits,
        grid=(loss.size,),
        block=(_threads(logits, by_packs),),
        args=(logits, targets, loss, *saved, dlogits, width, step, *options),
        WIDE=by_packs,
    )


def total_loss(
    loss: Array, targets: Array, ignore_index: int | None, reduction: str
) -> tuple[Array, Array]:
    """Return (total, scale), both (): the sum or mean of the losses, and its factor.

    scale: 1 for a sum, 1 / number of tokens that are not ignored for a mean
    """
    total, scale = empty(loss, ()), empty(loss, ())
    launch(
        SOURCE,
        "token_total",
        loss,
        grid=(1,),
        block=(threads(loss.size, MAX_THREADS),),
        args=(
            *(loss, targets, total, scale, loss.size),
            *(*_ignored(ignore_index), int(reduction == "mean")),
        ),
        WIDE=0,
    )
    return total, scale


def dlogits(cache: CupyCrossEntropyCache, dloss: Array, out: Array) -> Array:
    """Write the gradient of the logits to `out` (..., V), contiguous, and return it.

    `out` may be the cache's logits, if the caller does not need them any more.
    The cache has no further backward then.
    """
    logits, targets, ignore_index, top, total, scale, label_smoothing, z_loss = cache
    width = logits.shape[-1]
    options = (*_ignored(ignore_index), label_smoothing, z_loss, int(scale is None))
    by_packs = wide(width, logits, out)
    launch(
        SOURCE,
        "cross_entropy_backward",
        logits,
        grid=(top.size,),
        block=(_threads(logits, by_packs),),
        args=(logits, targets, top, total, contiguous(dloss), scale, out, width, width, *options),
        WIDE=by_packs,
    )
    return out


def _threads(logits: Array, by_packs: int) -> int:
    """Return the threads of a block, at most about one for each access of its row."""
    step = logits.shape[-1]
    return threads(step * logits.dtype.itemsize // 16 if by_packs else step, MAX_THREADS)


def _ignored(ignore_index: int | None) -> tuple[int, int]:
    """Return (1, ignore_index), or (0, 0) if no index is ignored."""
    return (0, 0) if ignore_index is None else (1, int(ignore_index))
