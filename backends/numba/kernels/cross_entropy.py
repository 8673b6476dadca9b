"""`cross_entropy`: backward computes the softmax again from the saved logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.flash_rows import copy
from xformer.backends.numba.kernels.layout import record, recorded
from xformer.backends.numba.kernels.losses import (
    Options,
    differentiate,
    option_array,
    tokens_of,
    weighted_sum,
)
from xformer.backends.numba.program.copies import contiguous, reshape
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.program import program_of
from xformer.backends.numba.program.traced import constant
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
from xformer.ops._loss import loss_options


def _refuses(logits: Array, **options: Any) -> str | None:
    return "only float32, and at least one class" if logits.shape[-1] == 0 else None


@recorded(ops.cross_entropy, _refuses)
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
    recorder = program_of(logits, targets)
    tokens = tokens_of(recorder, logits, targets, checked)
    n, n_classes = math.prod(logits.shape[:-1]), logits.shape[-1]
    rows = reshape(contiguous(logits), (n, n_classes))
    numbers = checked.numbers()
    ins, pieces = (rows, tokens.targets), recorder.pieces(rows.size)
    losses, _ = record(take_losses, "cross_entropy", *ins, pieces=pieces, **numbers)
    cache = NumbaCrossEntropyCache(rows, *tokens, checked, logits.shape)
    if checked.reduction == "none":
        return reshape(losses, logits.shape[:-1]), cache
    return weighted_sum(losses, tokens.weight), cache


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
        per_token = options.reduction == "none"
        expected = shape[:-1] if per_token else ()
        require_gradient("cross_entropy", "dloss", dloss, logits, expected)
        dloss = reshape(dloss, (dloss.size,))
        ins, name = (logits, targets, weight, dloss), "cross_entropy backward"
        pieces = program_of(*ins).pieces(logits.size)
        # The loop computes the losses too; they are not used.
        numbers = {"per_token": per_token, **options.numbers()}
        dlogits, _ = record(differentiate_losses, name, *ins, pieces=pieces, **numbers)
        return reshape(dlogits, shape)


@declared("losses (N), scratch (P, V) <- logits (N, V), targets (N) int64")
def take_losses(
    losses: Any, scratch: Any, logits: Any, targets: Any, label_smoothing: float, z_loss: float
) -> None:
    """Compute the losses of tokens."""
    options = option_array(label_smoothing, z_loss, np.float32(1))
    for i in range(len(logits)):
        copy(logits[i], scratch[0])
        differentiate(scratch, targets[i : i + 1], options, losses[i : i + 1])


@declared("dlogits (N, V), losses (N) <- logits (N, V), targets (N) int64, weight (1), dloss (M)")
def differentiate_losses(
    dlogits: Any,
    losses: Any,
    logits: Any,
    targets: Any,
    weight: Any,
    dloss: Any,
    start: int,
    per_token: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Compute dlogits of tokens. per_token: whether each token has its own dloss, else M is 1."""
    for i in range(len(logits)):
        scale = weight[0] * dloss[start + i if per_token else 0]
        options = option_array(label_smoothing, z_loss, scale)
        copy(logits[i], dlogits[i])
        differentiate(dlogits[i : i + 1], targets[i : i + 1], options, losses[i : i + 1])
