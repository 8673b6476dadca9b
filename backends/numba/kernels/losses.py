"""Losses of tokens: which of them count, and rows of logits that become their own gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.compiled import LOG2_E, exp2, less, rowwise
from xformer.backends.numba.flash_rows import ONE, ZERO, highest, multiply
from xformer.backends.numba.program.namespace import contiguous, reshape
from xformer.backends.numba.program.native import Native, bits, float32s, native, real, words
from xformer.backends.numba.program.program import Program
from xformer.checks import as_indices, finite, number
from xformer.ops.cross_entropy import require_options, split_ignored
from xformer.typing import Array

IGNORED = -1  # the target of a token that does not count
INDICES = np.iinfo(np.int64)


class Options(NamedTuple):
    """Of a loss, and which the kernels take."""

    label_smoothing: float
    z_loss: float
    reduction: str
    ignore_index: int | None

    def words(self) -> tuple[int, int]:
        return bits(self.label_smoothing), bits(self.z_loss)

    def of_each(self, logits: Any, targets: Any) -> Any:
        """The reference's losses of all tokens, and their cache."""
        a, z = self.label_smoothing, self.z_loss
        return ops.cross_entropy.reference(
            logits,
            targets=targets,
            ignore_index=IGNORED,
            label_smoothing=a,
            z_loss=z,
            reduction="none",
        )


def checked(
    label_smoothing: float, z_loss: float, reduction: str, ignore_index: int | None
) -> Options:
    """ValueError, TypeError as of `cross_entropy`."""
    a = number("cross_entropy", "label_smoothing", label_smoothing, low=0, high=1)
    z = finite("cross_entropy", "z_loss", z_loss)
    require_options(ignore_index, reduction)
    return Options(a, z, reduction, ignore_index)


class Tokens(NamedTuple):
    """targets (N,): int64, `IGNORED` or in [0, V). weight (1,): of a token's loss in the result."""

    targets: Array
    weight: Array


def tokens_of(program: Program, logits: Array, targets: Array, options: Options) -> Tokens:
    """Those of targets (...), which each run checks. logits (..., V): only V is looked at."""
    _, kept = split_ignored(logits, targets, options.ignore_index)
    given = contiguous(reshape(as_indices(targets), (targets.size,)))
    own, weight = program.fresh(given.shape, np.int64), program.fresh((1,), np.float32)
    ignored = None if kept is None else int(options.ignore_index)  # type: ignore[arg-type]
    if ignored is not None and not INDICES.min <= ignored <= INDICES.max:
        ignored = None
    n_classes, is_mean = logits.shape[-1], options.reduction == "mean"

    def run(own: Any, weight: Any, given: Any) -> None:
        outside = (given < 0) | (given >= n_classes)
        own[...] = np.where(outside if ignored is None else outside | (given == ignored), -1, given)
        weight[0] = 1 / max((own >= 0).sum(), 1) if is_mean else 1

    words_of = given.size, n_classes, int(ignored is not None), ignored or 0, int(is_mean)
    program.emit("targets", run, [own, weight], [given], Native(read_targets, words_of))
    return Tokens(own, weight)


def total(program: Program, losses: Array, weight: Array) -> Array:
    """Their sum, times the weight: ()."""
    loss = program.fresh((), np.float32)

    def run(loss: Any, losses: Any, weight: Any) -> None:
        loss[...] = np.sum(losses, dtype=np.float64) * weight[0]

    program.emit("loss", run, [loss], [losses, weight], Native(sum_losses, (losses.size,)))
    return loss


@native
def read_targets(args: int, piece: int, pieces: int, memory: int) -> None:
    """Copy the target ids, with the ids to ignore marked, and compute the weight of a token's loss.

    args: targets and weight (outputs); the given ids, N, V, whether there is an id to ignore, that
    id, whether the loss is a mean. The ids were checked before, but the caller may have changed the
    array since: an id that is out of range is ignored.
    """
    a = words(args, 8)
    n, n_classes, ignores, ignored, is_mean = a[3], a[4], a[5], a[6], a[7]
    targets, given, kept = words(a[0], n), words(a[2], n), 0
    for i in range(n):
        target = given[i]
        counts = 0 <= target < n_classes and not (ignores and target == ignored)
        targets[i] = target if counts else IGNORED
        kept += 1 if counts else 0
    float32s(a[1], (1,))[0] = ONE / np.float32(max(kept, 1)) if is_mean else ONE


@native
def sum_losses(args: int, piece: int, pieces: int, memory: int) -> None:
    """loss; losses, weight, how many."""
    a = words(args, 4)
    losses, result = float32s(a[1], (a[3],)), 0.0
    for loss in losses:
        result += loss
    float32s(a[0], (1,))[0] = np.float32(result * float32s(a[2], (1,))[0])


@rowwise
def numbers_of(label_smoothing: int, z_loss: int, weight: Any) -> Any:
    """What `differentiate` needs, from words."""
    own = np.empty(3, np.float32)
    own[0], own[1], own[2] = real(label_smoothing), real(z_loss), weight
    return own


@rowwise
def differentiate(x: Any, targets: Any, numbers: Any, losses: Any) -> None:
    """losses (N,) of logits (N, V), which become their gradients: 0 of a token that is ignored."""
    for i in range(len(x)):
        if targets[i] == IGNORED:
            losses[i] = ZERO
            x[i, :] = ZERO
        else:
            differentiate_rows(x[i : i + 1], targets[i : i + 1], numbers, losses[i : i + 1])


@rowwise
def differentiate_rows(x: Any, targets: Any, numbers: Any, losses: Any) -> None:
    """losses (N,) of logits (N, V), which become their gradients."""
    for i in range(len(x)):
        losses[i] = _loss(x[i], targets[i], numbers)


@rowwise
def _loss(x: Any, target: int, numbers: Any) -> Any:
    """The loss of one token's logits (V,), which are replaced by their gradient."""
    a, z, weight = numbers
    top = highest(x)
    hit, sum_of_all = less(x[target], top), ZERO  # lse - x would lose log(sum) where top is large
    if a > ZERO:
        for j in range(len(x)):
            sum_of_all += less(x[j], top)
    total = _exp(x, top)
    loss = np.log(total)  # lse - top
    lse = loss + top
    if z != ZERO:  # a factor of 0 would make NaN of what is too large
        loss += z * lse * lse
    if a < ONE:  # a factor of 0 would make NaN of a logit of -inf
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
def _exp(x: Any, top: Any) -> Any:
    """x = exp(x - top); their sum."""
    total = ZERO
    for j in range(len(x)):
        e = exp2((x[j] - top) * LOG2_E)
        x[j] = e
        total += e
    return total
