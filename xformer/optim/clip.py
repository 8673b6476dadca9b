"""Gradient clipping."""

from __future__ import annotations

from collections.abc import Sequence

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array, Tree
from xformer.dispatch import overridable
from xformer.dispatch.checks import number
from xformer.optim._checks import all_distinct, in_dtype, rebuilt, require_arrays


def clip_by_global_norm(
    grads: Tree, *, max_norm: float, donate: bool = False
) -> tuple[Tree, Array]:
    """grads * min(1, max_norm / (norm + 1e-6)), and the global norm before clipping.

    The formula of torch.nn.utils.clip_grad_norm_. The norm is an array () on the device.

    donate: the gradients may be overwritten; do not use them afterwards. If the norm is not finite,
        they are not overwritten.

    ValueError if there are no gradients or max_norm is not positive.
    """
    named = tree.flatten(grads)
    if not named:
        raise ValueError("clip_by_global_norm: there are no gradients")
    require_arrays("clip_by_global_norm", named)
    leaves = list(named.values())
    max_norm = number("clip_by_global_norm", "max_norm", max_norm)
    if max_norm <= 0:
        raise ValueError(f"clip_by_global_norm: max_norm must be positive, got {max_norm}")
    donate = donate and all_distinct(leaves)
    clipped, norm = clip_leaves(leaves, max_norm=max_norm, donate=donate)
    return rebuilt(grads, grads, leaves, clipped), norm


@overridable(backward=False)
def clip_leaves(
    grads: Sequence[Array], *, max_norm: float, donate: bool = False
) -> tuple[Sequence[Array], Array]:
    """`clip_by_global_norm` of the leaves of a tree. No array may appear twice."""
    xp = array_namespace(grads[0])
    norm = xp.sqrt(sum(xp.sum(g**2) for g in grads))
    scale = xp.minimum(max_norm / (norm + 1e-6), 1.0)
    return [g * in_dtype(scale, g) for g in grads], norm
