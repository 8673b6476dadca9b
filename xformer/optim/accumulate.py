"""Gradient accumulation: the gradients of a large batch from several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.pairwise_sum import PairwiseSum
from xformer.base.typing import Array, Tree
from xformer.optim._checks import in_dtype


def accumulate(
    loss: Callable[[Tree, int], tuple[Array, Any]], params: Tree, micro_batches: Sequence[Any]
) -> tuple[Array, Tree]:
    """The loss and the gradients of all micro-batches, as if they were one batch.

    loss: `loss(params, i)` returns the loss of micro-batch i, a mean over its targets, and the
        cache for backward.
    micro_batches: each has `n_targets`, the number of tokens that are not ignored.

    The result is sum(n_i loss_i) / N, with N targets in all. A plain mean of the losses would give
    more weight to the tokens of micro-batches with few targets. Auxiliary losses, such as router
    losses, get the same weights. A contrastive loss has negatives from one micro-batch only.

    Gradients are added pairwise, as in `PairwiseSum`: several processes that share the
    micro-batches get the same bits. Up to log2(n) + 1 trees of gradients are in memory.

    ValueError if there are no targets.
    """
    return weighted(loss, params, shares(micro_batches))


def shares(micro_batches: Sequence[Any], n_targets: int | None = None) -> list[float]:
    """The fraction of all targets in each micro-batch. ValueError if there are no targets.

    n_targets: of the micro-batches of all processes; None: of these micro-batches
    """
    total = sum(batch.n_targets for batch in micro_batches) if n_targets is None else n_targets
    if total < 1:
        raise ValueError(
            f"accumulate: there must be at least one target, got {total} in "
            f"{len(micro_batches)} micro-batches"
        )
    return [batch.n_targets / total for batch in micro_batches]


def weighted(
    loss: Callable[[Any, int], tuple[Array, Any]], params: Any, shares: Sequence[Any]
) -> tuple[Array, Any]:
    """The loss and the gradients, each a weighted sum over micro-batches, added pairwise.

    loss: as for `accumulate`.
    shares: the weight of each micro-batch, a number or an array () on the device.
    """
    total = PairwiseSum(lambda a, b: tree.map(lambda x, y: x + y, a, b))
    for i, raw_share in enumerate(shares):
        value, cache = loss(params, i)
        share = in_dtype(raw_share, value)
        plain = isinstance(share, float)
        grads = cache.backward(array_namespace(value).full_like(value, share) if plain else share)
        del cache  # frees its memory before the next forward
        total.add((value * share, grads))
        del grads
    mean, grads = total.total()
    return mean, grads
