"""Lion: every element steps by lr, in the direction of a sign."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.base import tree
from xformer.base.printing import short
from xformer.base.typing import Array, Tree
from xformer.dispatch.checks import finite
from xformer.ops._pointwise import sign
from xformer.optim._checks import (
    in_dtype,
    learning_rate,
    require_matching,
    require_state,
    two_betas,
    zeros,
)


@short
class LionState(NamedTuple):
    """The momentum of Lion. It takes half the memory of Adam's state."""

    m: Any  # tree like params: running mean of the gradients


def lion_init(params: Any) -> LionState:
    """The state before the first step: the momentum is 0."""
    return LionState(zeros("lion", params))


def lion(
    params: Tree,
    grads: Tree,
    state: LionState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    donate: bool = False,
) -> tuple[Tree, LionState]:
    """p <- (1 - lr * weight_decay) p - lr * sign(beta1 m + (1 - beta1) g) (arXiv:2302.06675).

    Then m <- beta2 m + (1 - beta2) g. Every element steps by lr. Choose an lr 3 to 10 times smaller
    than AdamW's, and a weight_decay larger by the same factor.

    params, grads: trees of the same structure.
    donate: has no effect here.

    ValueError for betas outside [0, 1), negative numbers, and gradients of another shape than their
    parameters.
    """
    require_state("lion", state, LionState)
    for what, other in (("the gradient", grads), ("m", state.m)):
        require_matching("lion", params, other, what)
    beta1, beta2 = two_betas("lion", betas)
    lr = learning_rate("lion", lr)
    keep = 1 - lr * finite("lion", "weight_decay", weight_decay, low=0)

    def update(p: Array, m: Array, g: Array) -> Array:
        return in_dtype(keep, p) * p - in_dtype(lr, p) * sign(beta1 * m + (1 - beta1) * g)

    new = tree.map(update, params, state.m, grads)
    return new, LionState(tree.map(lambda m, g: beta2 * m + (1 - beta2) * g, state.m, grads))
