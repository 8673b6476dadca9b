"""Gradient clipping."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from xformer import tree
from xformer.checks import number
from xformer.typing import Array


def clip_by_global_norm(grads: Any, *, max_norm: float) -> tuple[Any, Array]:
    """grads * min(1, max_norm / (norm + 1e-6)), and the norm over all of them, before clipping.

    As torch.nn.utils.clip_grad_norm_; the norm stays on the device, ().  ValueError where there
    are no gradients or max_norm is not positive.
    """
    leaves = list(tree.flatten(grads).values())
    if not leaves:
        raise ValueError("clip_by_global_norm: there are no gradients")
    max_norm = number("clip_by_global_norm", "max_norm", max_norm)
    if max_norm <= 0:
        raise ValueError(f"clip_by_global_norm: max_norm must be positive, got {max_norm}")
    xp = array_namespace(leaves[0])
    norm = xp.sqrt(sum(xp.sum(g**2) for g in leaves))
    scale = xp.minimum(max_norm / (norm + 1e-6), 1.0)
    return tree.map(lambda g: g * scale, grads), norm
