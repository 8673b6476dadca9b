"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.base import tree
from xformer.base.printing import short
from xformer.base.typing import Tree
from xformer.dispatch.checks import finite
from xformer.optim._checks import (
    in_dtype,
    learning_rate,
    require_matching,
    require_state,
    zeros,
)


@short
class SGDState(NamedTuple):
    """The velocity of SGD with momentum."""

    velocity: Any  # tree like params; None before the first step, and without momentum


def sgd_init(params: Any, *, velocity: bool = False) -> SGDState:
    """The state before the first step.

    velocity: zeros instead of None, so that the state has the same leaves after every step.
    """
    if not velocity:
        return SGDState(None)
    return SGDState(zeros("sgd", params))


def sgd(
    params: Tree,
    grads: Tree,
    state: SGDState,
    *,
    lr: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    donate: bool = False,
) -> tuple[Tree, SGDState]:
    """p <- p - lr * v, v <- momentum * v + g, g <- grad + weight_decay * p; as torch.optim.SGD.

    The first velocity is g itself.

    params, grads: trees of the same structure.
    nesterov: the step is along g + momentum * v.
    donate: has no effect here.

    ValueError for negative numbers, nesterov without momentum, and gradients of another shape than
    their parameters.
    """
    require_state("sgd", state, SGDState)
    require_matching("sgd", params, grads)
    lr = learning_rate("sgd", lr)
    momentum = finite("sgd", "momentum", momentum, low=0)
    weight_decay = finite("sgd", "weight_decay", weight_decay, low=0)
    if nesterov and momentum == 0:
        raise ValueError(f"sgd: nesterov needs a positive momentum, got {momentum}")
    if weight_decay:
        grads = tree.map(lambda p, g: g + weight_decay * p, params, grads)
    velocity, step = state.velocity, grads
    if momentum:
        velocity = grads
        if state.velocity is not None:
            require_matching("sgd", params, state.velocity, "the velocity")
            velocity = tree.map(lambda v, g: momentum * v + g, state.velocity, grads)
        step = velocity
        if nesterov:
            step = tree.map(lambda g, v: g + momentum * v, grads, velocity)
    return tree.map(lambda p, s: p - in_dtype(lr, p) * s, params, step), SGDState(velocity)
