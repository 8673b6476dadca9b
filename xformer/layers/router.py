"""The router of a mixture of experts: which experts a token runs through, and their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from array_api_compat import device

from xformer import ops
from xformer.base.namespace import array_namespace, largest_first
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import saved

if TYPE_CHECKING:
    from xformer.layers.experts import ExpertsConfig


def route(
    logits: Array, correction: Array | None = None, *, config: ExpertsConfig
) -> tuple[tuple[Array, Array], RouteCache]:
    """The weights (N, C) of the chosen experts, by falling scores, and their ids (N, C).

    The scores of a row are softmax(logits) or sigmoid(logits). With groups, experts outside the
    best groups are left out. Weights are the scores, divided by their sum if `config.normalise`,
    times `config.weight_scale`.

    logits: (N, E)
    correction: (E,), added to the scores for the choice, not for the weights (DeepSeek-V3,
        arXiv:2412.19437, eq. 16). A small change of it does not change y, so its gradient is 0.
    """
    xp = array_namespace(logits)
    # Softmax does not change the order, and of the chosen logits it is what normalising gives.
    of_chosen = config.score == "softmax" and config.normalise
    scores, sums = logits, None
    cache: Any = None
    if config.score == "sigmoid":
        scores, cache = ops.sigmoid(logits)
    elif not of_chosen:
        scores, cache = ops.softmax(logits)
    keys = scores if correction is None else scores + correction
    if config.n_groups > 1:
        keys = _of_best_groups(keys, config)
    ids = largest_first(keys)[:, : config.top_k]
    weights = xp.take_along_axis(scores, ids, axis=-1)
    if of_chosen:
        weights, cache = ops.softmax(weights)
    elif config.normalise:
        sums = xp.sum(weights, axis=-1, keepdims=True) + 1e-20  # (N, 1)
        weights = weights / sums
    shares = None if sums is None else weights
    if config.weight_scale != 1.0:
        weights = weights * config.weight_scale
    rest = of_chosen, config.weight_scale, logits.shape[1]
    return (weights, ids), saved(RouteCache(ids, cache, shares, sums, *rest))


@short
class RouteCache(NamedTuple):
    """Saved by `route` for backward: the cache of the scores, and how they became weights."""

    ids: Array  # (N, C)
    scores: Any  # of `ops.softmax` or `ops.sigmoid`
    shares: Array | None  # (N, C), the normalised scores of sigmoid; None for others
    sums: Array | None  # (N, 1), by which they were divided
    of_chosen: bool  # whether softmax was only of the chosen logits
    scale: float
    n_experts: int

    def backward(self, dweights: Array) -> Array:
        """dlogits (N, E). A logit that was not chosen has a gradient only through softmax.

        For shares s / sum(s): ds = (dshares - sum(dshares * shares)) / sum(s).
        """
        if self.scale != 1.0:
            dweights = dweights * self.scale
        if self.of_chosen:
            return self._spread(self.scores.backward(dweights))
        if self.shares is not None and self.sums is not None:
            xp = array_namespace(dweights)
            mean = xp.sum(dweights * self.shares, axis=-1, keepdims=True)
            dweights = (dweights - mean) / self.sums
        dlogits: Array = self.scores.backward(self._spread(dweights))
        return dlogits

    def _spread(self, dchosen: Array) -> Array:
        """(N, C) -> (N, E): the values of the chosen experts, 0 for the others."""
        xp = array_namespace(dchosen)
        every = xp.arange(self.n_experts, dtype=self.ids.dtype, device=device(self.ids))
        hit = self.ids[:, :, None] == every  # (N, C, E)
        return xp.sum(xp.where(hit, dchosen[:, :, None], 0.0), axis=1)


def _of_best_groups(keys: Array, config: ExpertsConfig) -> Array:
    """(N, E): keys, with -inf for experts outside the `top_groups` best groups of a row.

    The key of a group is the sum of its `group_top` largest keys.
    """
    xp = array_namespace(keys)
    shape = (keys.shape[0], config.n_groups, config.n_experts // config.n_groups)
    grouped = xp.reshape(keys, shape)  # (N, groups, E / groups)
    order = largest_first(grouped)[..., : config.group_top]
    group_keys = xp.sum(xp.take_along_axis(grouped, order, axis=-1), axis=-1)  # (N, groups)
    ids = largest_first(group_keys)[:, : config.top_groups]
    every = xp.arange(config.n_groups, dtype=ids.dtype, device=device(ids))
    hits = xp.where(ids[:, :, None] == every, xp.ones_like(group_keys)[:, None, :], 0.0)
    is_best = xp.sum(hits, axis=1)[:, :, None] > 0.5  # (N, groups, 1)
    return xp.reshape(xp.where(is_best, grouped, -xp.inf), keys.shape)
