"""Loops and instructions that the cross-entropy kernels share.

They copy and check target ids, compute losses of tokens, and replace rows of logits by their
gradients in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.flash_rows import ONE, ZERO, highest, multiply
from xformer.backends.numba.jit import LOG2_E, exp2, less, rowwise
from xformer.backends.numba.kernels.layout import record
from xformer.backends.numba.program.copies import reshape
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.program import Program
from xformer.base.typing import Array
from xformer.dispatch.checks import as_indices
from xformer.ops._loss import LossOptions
from xformer.ops.cross_entropy import split_ignored

IGNORED = -1  # the target id of a token that is ignored
INDICES = np.iinfo(np.int64)


class Options(LossOptions):
    """The checked options of `cross_entropy`, as numbers of an instruction."""

    __slots__ = ()

    def numbers(self) -> dict[str, Any]:
        """Return label_smoothing and z_loss, as numbers of an instruction."""
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}


class Tokens(NamedTuple):
    """The targets of a loss, and the weight of each token's loss in the result."""

    targets: Array  # (N,) int64: `IGNORED`, or in [0, V)
    weight: Array  # (1,): 1 / number of tokens that are not ignored for a mean, else 1


def tokens_of(program: Program, logits: Array, targets: Array, options: Options) -> Tokens:
    """Record checks of target ids (...) and their copy, and return `Tokens`.

    logits: (..., V); only the size V is used.
    """
    _, kept = split_ignored(logits, targets, options.ignore_index)  # records the checks
    ids = reshape(as_indices(targets), (targets.size,))
    ignored = None if kept is None else int(options.ignore_index)  # type: ignore[arg-type]
    if ignored is not None and not INDICES.min <= ignored <= INDICES.max:
        ignored = None
    n_classes, is_mean = logits.shape[-1], options.reduction == "mean"
    numbers: Any = {
        "n_classes": n_classes,
        "ignores": ignored is not None,
        "ignored": ignored or 0,
        "is_mean": is_mean,
    }
    return Tokens(*record(copy_targets, "targets", ids, program=program, pieces=1, **numbers))


def weighted_sum(losses: Array, weight: Array) -> Array:
    """Return weight * sum(losses), (). losses: (N,)   weight: (1,)"""
    return record(sum_losses, "loss", losses, weight)[0]


@declared("targets (N) int64, weight (1) <- ids (N) int64")
def copy_targets(
    targets: Any, weight: Any, ids: Any, n_classes: int, ignores: int, ignored: int, is_mean: int
) -> None:
    """Copy the target ids, with the ids to ignore marked, and compute the weight of a token's loss.

    ignores: whether there is an id to ignore, `ignored`. The ids were checked, but the caller may
    change their array during a run: an id that is out of range is ignored.
    """
    n_kept = 0
    for i in range(len(ids)):
        target = ids[i]
        counts = 0 <= target < n_classes and not (ignores and target == ignored)
        targets[i] = target if counts else IGNORED
        n_kept += 1 if counts else 0
    weight[0] = ONE / np.float32(max(n_kept, 1)) if is_mean else ONE


@declared("loss () <- losses (N), weight (1)")
def sum_losses(loss: Any, losses: Any, weight: Any) -> None:
    """Compute loss = weight * sum(losses) in float64."""
    result = 0.0
    for x in losses:
        result += x
    loss[0] = np.float32(result * weight[0])


@rowwise
def option_array(label_smoothing: float, z_loss: float, weight: Any) -> Any:
    """Return (label smoothing, z loss, weight) as the array that `differentiate` reads."""
    options = np.empty(3, np.float32)
    options[0], options[1], options[2] = label_smoothing, z_loss, weight
    return options


@rowwise
def differentiate(x: Any, targets: Any, options: Any, losses: Any) -> None:
    """Write losses (N,), and replace the logits x (N, V) by their gradients.

    targets: (N,) int64; the loss and gradients of an ignored token are 0.
    options: an `option_array`
    """
    for i in range(len(x)):
        if targets[i] == IGNORED:
            losses[i] = ZERO
            x[i, :] = ZERO
        else:
            differentiate_rows(x[i : i + 1], targets[i : i + 1], options, losses[i : i + 1])


@rowwise
def differentiate_rows(x: Any, targets: Any, options: Any, losses: Any) -> None:
    """As `differentiate`, if no token is ignored."""
    for i in range(len(x)):
        losses[i] = _loss(x[i], targets[i], options)


@rowwise
def _loss(x: Any, target: int, options: Any) -> Any:
    """Replace the logits x (V,) of one token by their gradient, and return the token's loss."""
    a, z, weight = options
    largest = highest(x)
    # Subtract `largest` first: in lse - x, log(sum) would lose digits if `largest` is large.
    hit, sum_of_all = less(x[target], largest), ZERO
    if a > ZERO:
        for j in range(len(x)):
            sum_of_all += less(x[j], largest)
    total = _exp(x, largest)
    loss = np.log(total)  # lse - largest
    lse = loss + largest
    if z != ZERO:  # 0 * inf would be NaN
        loss += z * lse * lse
    if a < ONE:  # 0 * -inf would be NaN
        loss -= (ONE - a) * hit
    if a > ZERO:
        loss -= a * (sum_of_all / len(x))
    multiply(x, weight * (ONE + (ONE + ONE) * z * lse) / total, x)
    x[target] -= weight * (ONE - a)
    if a > ZERO:
        for j in range(len(x)):
            x[j] -= weight * a / len(x)
    return loss


@rowwise
def _exp(x: Any, shift: Any) -> Any:
    """Replace x by exp(x - shift), and return the sum."""
    total = ZERO
    for j in range(len(x)):
        e = exp2((x[j] - shift) * LOG2_E)
        x[j] = e
        total += e
    return total
