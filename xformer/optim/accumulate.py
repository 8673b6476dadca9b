"""Gradients of a batch that does not fit in memory, from several smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from array_api_compat import array_namespace

from xformer import tree
from xformer.optim._checks import in_dtype
from xformer.typing import Array, Tree


def accumulate(
    loss: Callable[[Tree, int], tuple[Array, Any]], params: Tree, micro_batches: Sequence[Any]
) -> tuple[Array, Tree]:
    """The loss and the gradients of all micro-batches as one batch, for a loss that is a mean.

    loss(params, i) is the mean over `micro_batches[i].n_targets` targets (tokens that are not
    ignored) and the cache whose backward follows. Each counts by its share of all N targets:
    sum(n_i loss_i) / N. The mean of the means would count the tokens of short texts more.

    What a loss has beside such a mean is weighed likewise, as the auxiliary losses of routers;
    negatives are those of the micro-batch. ValueError where there are no targets.
    """
    return weighted(loss, params, shares(micro_batches))


def shares(micro_batches: Sequence[Any]) -> list[float]:
    """Of all targets, those of each micro-batch. ValueError where there are none."""
    total = sum(batch.n_targets for batch in micro_batches)
    if total < 1:
        raise ValueError(
            f"accumulate: there must be at least one target, got {total} in "
            f"{len(micro_batches)} micro-batches"
        )
    return [batch.n_targets / total for batch in micro_batches]


def weighted(
    loss: Callable[[Any, int], tuple[Array, Any]], params: Any, shares: Sequence[Any]
) -> tuple[Array, Any]:
    """`accumulate` by the share of each micro-batch: a number, or an array () of the device."""
    mean: Any = None
    grads: Any = None
    for i, given in enumerate(shares):
        value, cache = loss(params, i)
        share = in_dtype(given, value)
        plain = isinstance(share, float)
        more = cache.backward(array_namespace(value).full_like(value, share) if plain else share)
        del cache  # before the next one is made
        mean = value * share if mean is None else mean + value * share
        grads = more if grads is None else tree.map(lambda a, b: a + b, grads, more)
    return mean, grads
