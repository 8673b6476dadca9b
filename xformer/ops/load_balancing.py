"""The auxiliary loss that balances the load of the experts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_axis, require_gradient, require_ids
from xformer.dispatch.shapes import require_array, require_same_device, require_same_library, shapes
from xformer.ops._loss import one
from xformer.ops.index_add import index_add
from xformer.ops.softmax import softmax


@overridable
@shapes("logits (N, E)  ids (N, C)  mask (N)")
def load_balancing(
    logits: Array, *, ids: Array, mask: Array | None = None
) -> tuple[Array, LoadBalancingCache]:
    """loss = E * sum_e f_e p_e; it is C if the load is even (arXiv:2101.03961, eq. 4 to 6).

    E is the number of experts, C the number of choices of a row, N the number of rows. f_e is the
    number of choices of expert e by rows that count, divided by the number of these rows. p_e is
    the mean over these rows of softmax(logits). The gradient treats f as a constant. For several
    layers, concatenate their rows, as Mixtral does.

    logits: (N, E)   ids: (N, C) integers in [0, E)   mask: (N,) boolean   loss: ()
    mask: only rows with True count. If no row counts, the loss is 0.

    ValueError for another shape or an id out of range; TypeError for another dtype.
    Derivation: docs/derivations/load_balancing.md
    """
    require_axis("load_balancing", logits, -1, "logits")
    n_experts = logits.shape[1]
    ids = require_ids("load_balancing", "ids", ids, n_experts, logits)
    xp = array_namespace(logits)
    logits, weight = kept_rows("load_balancing", logits, mask)
    probs, softmax_cache = softmax(logits)
    n_choices = math.prod(ids.shape)
    each = xp.reshape(xp.broadcast_to(weight[:, None], ids.shape), (n_choices, 1))
    zeros = xp.zeros((n_experts, 1), dtype=logits.dtype, device=device(logits))
    f = index_add(zeros, each, ids=xp.reshape(ids, (n_choices,)))[0][:, 0]  # (E,)
    p = xp.sum(probs * weight[:, None], axis=0)  # (E,)
    return n_experts * xp.sum(f * p), LoadBalancingCache(f, weight, softmax_cache)


@short
class LoadBalancingCache(NamedTuple):
    """Saved by `load_balancing` for backward: f, the weight of each row, and the probabilities.

    The ids are not saved: the loss depends on them only through f, a constant for the gradient.
    """

    f: Array  # (E,)
    weight: Array  # (N,): 1 / (rows that count), or 0
    softmax: Any  # the cache of the softmax of the logits, with the probabilities

    def backward(self, dloss: Array | None = None) -> Array:
        """dlogits = E * dloss * weight * probs * (f - sum(f * probs)), the sum over experts."""
        dloss = one(self.f) if dloss is None else dloss
        require_gradient("load_balancing", "dloss", dloss, self.f, ())
        dp = self.f.shape[0] * dloss * self.f
        return self.softmax.backward(self.weight[:, None] * dp)


def kept_rows(op: str, logits: Array, mask: Array | None) -> tuple[Array, Array]:
    """(logits, weight): logits with zeros in masked rows, and the weight of each row in a mean.

    logits: (N, E)   mask: (N,) boolean, or None   weight: (N,)
    The zeros prevent that a NaN in a masked row spreads. TypeError unless the mask is boolean.
    """
    xp = array_namespace(logits)
    if mask is None:
        return logits, xp.ones_like(logits[:, 0]) / max(logits.shape[0], 1)
    require_array(op, "mask", mask, "a boolean array")
    require_same_library(op, "mask", mask, logits)
    require_same_device(op, "mask", mask, logits)
    if not xp.isdtype(mask.dtype, "bool"):
        raise TypeError(f"{op}: mask must be boolean (True = counts), got dtype {mask.dtype}")
    weight = xp.astype(mask, logits.dtype)
    masked = xp.where(mask[:, None], logits, 0.0)
    return masked, weight / xp.maximum(xp.sum(weight), 1.0)
