"""`cross_entropy`: backward makes the probabilities once more, of logits that stay."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.kernels.layout import program_of
from xformer.backends.numba.kernels.losses import (
    Options,
    checked,
    differentiate,
    numbers_of,
    tokens_of,
    total,
)
from xformer.backends.numba.program import program
from xformer.backends.numba.program.namespace import contiguous, reshape
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.backends.numba.program.traced import constant
from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.showing import short
from xformer.typing import Array


def unsupported(
    logits: Array,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> str | None:
    """Why the kernel cannot run."""
    if logits.dtype != np.float32 or logits.shape[-1] == 0:
        return "only float32, and at least one class"
    return None if program.of([logits, targets]) else "all arrays are constants"


@kernel(ops.cross_entropy, "numba.kernels", unsupported=unsupported)
def cross_entropy(
    logits: Array,
    *,
    targets: Array,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Array, CrossEntropyCache]:
    """The loss of each token, or what they come to."""
    options = checked(label_smoothing, z_loss, reduction, ignore_index)
    recorder = program.of([logits, targets])
    assert recorder is not None  # else this were unsupported
    tokens = tokens_of(recorder, logits, targets, options)
    n, n_classes = math.prod(logits.shape[:-1]), logits.shape[-1]
    rows, pieces = reshape(contiguous(logits), (n, n_classes)), recorder.pieces(logits.size)
    losses = recorder.fresh((n,), np.float32)
    row = recorder.fresh((pieces, n_classes), np.float32)  # of each piece, to work in

    def run(losses: Any, row: Any, logits: Any, targets: Any) -> None:
        losses[...] = options.of_each(logits, targets)[0]

    own = Native(take_losses, (n, n_classes, *options.words()), pieces)
    recorder.emit("cross_entropy", run, [losses, row], [rows, tokens.targets], own)
    cache = CrossEntropyCache(rows, *tokens, options, logits.shape)
    if reduction == "none":
        return reshape(losses, logits.shape[:-1]), cache
    return total(recorder, losses, tokens.weight), cache


@short
class CrossEntropyCache(NamedTuple):
    """Saved by `cross_entropy` for backward."""

    logits: Array  # (N, V)
    targets: Array  # (N,), as `losses.Tokens` has them
    weight: Array  # (1,)
    options: Options
    shape: tuple[int, ...]  # of the logits

    def backward(self, dloss: Array | None = None) -> Array:
        """dlogits = dloss * weight * (p (1 + 2 z lse) - (1 - a) onehot(target) - a / V)."""
        dloss = constant(np.ones((), np.float32)) if dloss is None else dloss
        logits, targets, weight, options, shape = self
        recorder = program_of(logits, targets, dloss)
        each = options.reduction == "none"
        expected = shape[:-1] if each else ()
        require_gradient("cross_entropy", "dloss", dloss, logits, expected)
        dloss = contiguous(reshape(dloss, (dloss.size,)))
        dlogits = recorder.fresh(logits.shape, np.float32)
        losses = recorder.fresh(targets.shape, np.float32)  # once more, since they are at hand

        def run(dlogits: Any, losses: Any, *ins: Any) -> None:
            logits, targets, weight, dloss = ins
            losses[...], cache = options.of_each(logits, targets)
            dlogits[...] = cache.backward(np.broadcast_to(dloss * weight[0], losses.shape))

        ins, numbers = [logits, targets, weight, dloss], (*logits.shape, int(each))
        own = (*numbers, *options.words())
        pieces = recorder.pieces(logits.size)
        native = Native(differentiate_losses, own, pieces)
        recorder.emit("cross_entropy backward", run, [dlogits, losses], ins, native)
        return reshape(dlogits, shape)


@native
def take_losses(args: int, piece: int, pieces: int, memory: int) -> None:
    """losses, a row for each piece; logits, targets, N, V, label smoothing, z loss."""
    a = words(args, 8)
    n, v = a[4], a[5]
    own, row = numbers_of(a[6], a[7], np.float32(1)), float32s(a[1] + 4 * piece * v, (1, v))
    start, stop = part(n, piece, pieces, 1)
    for i in range(start, stop):
        row[0, :] = float32s(a[2] + 4 * i * v, (v,))
        differentiate(row, words(a[3] + 8 * i, 1), own, float32s(a[0] + 4 * i, (1,)))


@native
def differentiate_losses(args: int, piece: int, pieces: int, memory: int) -> None:
    """dlogits, losses; logits, targets, weight, dloss, N, V, whether each has a dloss, a, z."""
    a = words(args, 11)
    n, v, each = a[6], a[7], a[8]
    weight = float32s(a[4], (1,))[0]
    start, stop = part(n, piece, pieces, 1)
    for i in range(start, stop):
        own = numbers_of(a[9], a[10], weight * float32s(a[5] + 4 * (i if each else 0), (1,))[0])
        row = float32s(a[0] + 4 * i * v, (1, v))
        row[0, :] = float32s(a[2] + 4 * i * v, (v,))
        differentiate(row, words(a[3] + 8 * i, 1), own, float32s(a[1] + 4 * i, (1,)))
