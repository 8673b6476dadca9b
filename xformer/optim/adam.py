"""Adam, and Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace

from xformer import tree
from xformer.checks import number
from xformer.optim._checks import (
    in_dtype,
    learning_rate,
    require_matching,
    require_state,
    two_betas,
)
from xformer.typing import Array


class AdamState(NamedTuple):
    """Moments of the gradients, and the number of steps taken."""

    step: int
    m: Any  # tree of the parameters: running mean of the gradients
    v: Any  # running mean of their squares


def adam_init(params: Any) -> AdamState:
    """State before the first step: moments zero."""

    def zeros() -> Any:
        return tree.map(lambda p: array_namespace(p).zeros_like(p), params)

    return AdamState(0, zeros(), zeros())


adamw_init = adam_init


def adam(
    params: Any,
    grads: Any,
    state: AdamState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Any, AdamState]:
    """p <- p - lr * mhat / (sqrt(vhat) + eps) (arXiv:1412.6980); as torch.optim.Adam.

    mhat = m / (1 - beta1^t), vhat = v / (1 - beta2^t). weight_decay * p is added to the gradient.
    params, grads: trees of one structure. ValueError for betas outside [0, 1), negative numbers,
    and gradients whose shapes are not their parameters'.
    """
    weight_decay = number("adam", "weight_decay", weight_decay, low=0)
    require_matching("adam", params, grads)
    if weight_decay:
        grads = tree.map(lambda p, g: g + weight_decay * p, params, grads)
    return _step("adam", params, grads, state, learning_rate("adam", lr), betas, eps, keep=1.0)


def adamw(
    params: Any,
    grads: Any,
    state: AdamState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[Any, AdamState]:
    """p <- (1 - lr * weight_decay) p, then a step of Adam (arXiv:1711.05101); as torch's AdamW.

    params, grads: trees of one structure. ValueError as `adam`.
    """
    lr = learning_rate("adamw", lr)
    keep = 1 - lr * number("adamw", "weight_decay", weight_decay, low=0)
    return _step("adamw", params, grads, state, lr, betas, eps, keep)


def _step(
    op: str,
    params: Any,
    grads: Any,
    state: AdamState,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    keep: float,
) -> tuple[Any, AdamState]:
    require_state(op, state, AdamState)
    for what, other in (("the gradient", grads), ("m", state.m), ("v", state.v)):
        require_matching(op, params, other, what)
    beta1, beta2 = two_betas(op, betas)
    eps = number(op, "eps", eps, low=0)
    t = state.step + 1
    m = tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.m, grads)
    v = tree.map(lambda v, g: beta2 * v + (1 - beta2) * g**2, state.v, grads)
    rate = lr / (1 - beta1**t)
    root = (1 - beta2**t) ** 0.5  # math.sqrt takes no traced step (jax.jit)

    def update(p: Array, m: Array, v: Array) -> Array:
        old, step = in_dtype(keep, p), in_dtype(rate, p)
        return old * p - step * m / (array_namespace(v).sqrt(v) / in_dtype(root, p) + eps)

    return tree.map(update, params, m, v), AdamState(t, m, v)
