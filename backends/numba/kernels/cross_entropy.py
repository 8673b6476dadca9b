"""`cross_entropy`: backward computes the softmax again from the saved logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.flash_rows import copy
from xformer.backends.numba.kernels.layout import program_of
from xformer.backends.numba.kernels.losses import (
    Options,
    differentiate,
    option_array,
    tokens_of,
    weighted_sum,
)
from xformer.backends.numba.program import program
from xformer.backends.numba.program.namespace import contiguous, reshape
from xformer.backends.numba.program.native import Native, float32s, native, part, words
from xformer.backends.numba.program.traced import constant
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.ops._loss import loss_options


def unsupported(
    logits: Array,
    *,
    targets: Array,
    **options: Any,
) -> str | None:
    """Return why the numba kernel of `cross_entropy` cannot run, or None if it can.

    It needs float32 logits of at least one class. Logits and targets must not both be constants
    of the program.
    """
    if logits.dtype != np.float32 or logits.shape[-1] == 0:
        return "only float32, and at least one class"
    return None if program.of([logits, targets]) else "all arrays are constants"


@kernel(ops.cross_entropy, "numba.kernels", unsupported=unsupported)
def cross_entropy(
    logits: Array,
    *,
    targets: Array,
    **options: Any,
) -> tuple[Array, NumbaCrossEntropyCache]:
    """Record one instruction for the losses of all tokens, and return (loss, cache).

    logits: (..., V)   targets: (...) integers in [0, V)   loss: (), or (...) for reduction "none"
    For the formula and the options see `ops.cross_entropy`. Further instructions check and copy the
    targets, and for "mean" and "sum" add the losses.
    """
    checked = Options(*loss_options(**options))
    recorder = program.of([logits, targets])
    assert recorder is not None  # `unsupported` has checked this
    tokens = tokens_of(recorder, logits, targets, checked)
    n, n_classes = math.prod(logits.shape[:-1]), logits.shape[-1]
    rows, pieces = reshape(contiguous(logits), (n, n_classes)), recorder.pieces(logits.size)
    losses = recorder.fresh((n,), np.float32)
    row = recorder.fresh((pieces, n_classes), np.float32)  # scratch of each piece

    def run(losses: Any, row: Any, logits: Any, targets: Any) -> None:
        losses[...] = checked.reference(logits, targets)[0]

    compiled = Native(take_losses, (n, n_classes, *checked.words()), pieces)
    recorder.emit("cross_entropy", run, [losses, row], [rows, tokens.targets], compiled)
    cache = NumbaCrossEntropyCache(rows, *tokens, checked, logits.shape)
    if checked.reduction == "none":
        return reshape(losses, logits.shape[:-1]), cache
    return weighted_sum(recorder, losses, tokens.weight), cache


@short
class NumbaCrossEntropyCache(NamedTuple):
    """Saved by `cross_entropy` for backward: logits and targets. Softmax is computed again."""

    logits: Array  # (N, V)
    targets: Array  # (N,), of `losses.Tokens`
    weight: Array  # (1,), of `losses.Tokens`
    options: Options
    shape: tuple[int, ...]  # of the logits

    def backward(self, dloss: Array | None = None) -> Array:
        """dlogits = dloss * weight * (p (1 + 2 z lse) - (1 - a) onehot(target) - a / V).

        For each token: p = softmax(x) with x its logits, lse = log(sum(exp(x))), z = z_loss,
        a = label_smoothing, V the number of classes. weight is 1 / number of tokens that are not
        ignored for a mean, else 1. Ignored tokens have dlogits = 0.

        dloss: (), or (...) for reduction "none"; None: 1   dlogits: (..., V)
        """
        dloss = constant(np.ones((), np.float32)) if dloss is None else dloss
        logits, targets, weight, options, shape = self
        recorder = program_of(logits, targets, dloss)
        per_token = options.reduction == "none"
        expected = shape[:-1] if per_token else ()
        require_gradient("cross_entropy", "dloss", dloss, logits, expected)
        dloss = contiguous(reshape(dloss, (dloss.size,)))
        dlogits = recorder.fresh(logits.shape, np.float32)
        losses = recorder.fresh(targets.shape, np.float32)  # the loop computes them too; not used

        def run(dlogits: Any, losses: Any, *ins: Any) -> None:
            logits, targets, weight, dloss = ins
            losses[...], cache = options.reference(logits, targets)
            dlogits[...] = cache.backward(np.broadcast_to(dloss * weight[0], losses.shape))

        ins, numbers = [logits, targets, weight, dloss], (*logits.shape, int(per_token))
        pieces = recorder.pieces(logits.size)
        compiled = Native(differentiate_losses, (*numbers, *options.words()), pieces)
        recorder.emit("cross_entropy backward", run, [dlogits, losses], ins, compiled)
        return reshape(dlogits, shape)


@native
def take_losses(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute the losses of a piece of the tokens.

    outputs: losses (N,), scratch (pieces, V); inputs: logits (N, V), targets (N,) int64. integers:
    N, V, bits of label smoothing and z loss.
    """
    a = words(args, 8)
    n, v = a[4], a[5]
    options, row = option_array(a[6], a[7], np.float32(1)), float32s(a[1] + 4 * piece * v, (1, v))
    start, stop = part(n, piece, pieces, 1)
    for i in range(start, stop):
        copy(float32s(a[2] + 4 * i * v, (v,)), row[0])
        differentiate(row, words(a[3] + 8 * i, 1), options, float32s(a[0] + 4 * i, (1,)))


@native
def differentiate_losses(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute dlogits of a piece of the tokens.

    outputs: dlogits (N, V), losses (N,); inputs: logits (N, V), targets (N,) int64, weight (1,),
    dloss (N,) or (1,). integers: N, V, whether each token has its own dloss, bits of label
    smoothing and z loss.
    """
    a = words(args, 11)
    n, v, per_token = a[6], a[7], a[8]
    weight = float32s(a[4], (1,))[0]
    start, stop = part(n, piece, pieces, 1)
    for i in range(start, stop):
        dloss = float32s(a[5] + 4 * (i if per_token else 0), (1,))[0]
        options = option_array(a[9], a[10], weight * dloss)
        row = float32s(a[0] + 4 * i * v, (1, v))
        copy(float32s(a[2] + 4 * i * v, (v,)), row[0])
        differentiate(row, words(a[3] + 8 * i, 1), options, float32s(a[1] + 4 * i, (1,)))
