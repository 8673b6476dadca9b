"""Adam, and Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array, Tree
from xformer.dispatch import overridable
from xformer.dispatch.checks import finite, number
from xformer.optim._checks import (
    all_distinct,
    in_dtype,
    learning_rate,
    rebuilt,
    require_matching,
    require_state,
    side_by_side,
    two_betas,
    zeros,
)


@short
class AdamState(NamedTuple):
    """The two moments of the gradients, and the number of steps."""

    step: int
    m: Any  # tree like params: running mean of the gradients
    v: Any  # tree like params: running mean of the squared gradients


def adam_init(params: Any) -> AdamState:
    """The state before the first step: all moments are 0."""
    return AdamState(0, zeros("adam", params), zeros("adam", params))


adamw_init = adam_init


def adam(
    params: Tree,
    grads: Tree,
    state: AdamState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    donate: bool = False,
) -> tuple[Tree, AdamState]:
    """p <- p - lr * mhat / (sqrt(vhat) + eps) (arXiv:1412.6980); as torch.optim.Adam.

    mhat = m / (1 - beta1^t), vhat = v / (1 - beta2^t).

    params, grads: trees of the same structure.
    weight_decay: weight_decay * p is added to the gradient.
    donate: params and state may be overwritten; do not use them afterwards.

    ValueError for betas outside [0, 1), negative numbers, and gradients of another shape than their
    parameters.
    """
    weight_decay = finite("adam", "weight_decay", weight_decay, low=0)
    if weight_decay:
        require_matching("adam", params, grads)
        grads = tree.map(lambda p, g: g + weight_decay * p, params, grads)
    lr = learning_rate("adam", lr)
    return _step("adam", params, grads, state, lr, betas, eps, 1.0, donate)


def adamw(
    params: Tree,
    grads: Tree,
    state: AdamState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    donate: bool = False,
) -> tuple[Tree, AdamState]:
    """p <- (1 - lr * weight_decay) p, then a step of Adam (arXiv:1711.05101); as torch's AdamW.

    Returns (params, state) after the step. All leaves decay, also biases and weights of norms.

    params, grads: trees of the same structure.
    state: of `adamw_init`, or of the step before.
    donate: params and state may be overwritten; do not use them afterwards.

    ValueError for betas outside [0, 1), negative lr, eps or weight_decay, and a gradient that is
    missing, has no parameter, or has another shape than its parameter.
    """
    lr = learning_rate("adamw", lr)
    keep = 1 - lr * finite("adamw", "weight_decay", weight_decay, low=0)
    return _step("adamw", params, grads, state, lr, betas, eps, keep, donate)


def _step(
    op: str,
    params: Any,
    grads: Any,
    state: AdamState,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    keep: float,
    donate: bool,
) -> tuple[Any, AdamState]:
    require_state(op, state, AdamState)
    trees = {"the gradient": grads, "m": state.m, "v": state.v}
    p, g, m, v = side_by_side(op, params, **trees)
    beta1, beta2 = two_betas(op, betas)
    t = state.step + 1
    new_p, new_m, new_v = adam_update(
        p,
        g,
        m,
        v,
        rate=lr / (1 - beta1**t),
        root=(1 - beta2**t) ** 0.5,  # math.sqrt fails on a traced step (jax.jit)
        keep=keep,
        betas=(beta1, beta2),
        eps=number(op, "eps", eps, low=0),
        donate=donate and all_distinct(p, m, v),
    )
    moments = rebuilt(state.m, params, m, new_m), rebuilt(state.v, params, v, new_v)
    return rebuilt(params, params, p, new_p), AdamState(t, *moments)


@overridable(backward=False)
def adam_update(
    params: Sequence[Array],
    grads: Sequence[Array],
    m: Sequence[Array],
    v: Sequence[Array],
    *,
    rate: Any,
    root: float,
    keep: Any,
    betas: tuple[float, float],
    eps: float,
    donate: bool = False,
) -> tuple[list[Array], list[Array], list[Array]]:
    """The new params, m and v of one Adam step, for the leaves of a tree.

    m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2, and then
    p <- keep p - rate m / (sqrt(v) / root + eps).

    donate: a kernel may overwrite params, m and v. No array may appear twice in them.
    """
    beta1, beta2 = betas

    def update(p: Array, m: Array, v: Array) -> Array:
        old, step = in_dtype(keep, p), in_dtype(rate, p)
        return old * p - step * m / (array_namespace(v).sqrt(v) / in_dtype(root, p) + eps)

    m = [beta1 * m + (1 - beta1) * g for m, g in zip(m, grads, strict=True)]
    # Not (1 - beta2) * g**2: g^2 overflows earlier. torch computes it in this order too.
    v = [beta2 * v + (1 - beta2) * g * g for v, g in zip(v, grads, strict=True)]
    return [update(*leaf) for leaf in zip(params, m, v, strict=True)], m, v
