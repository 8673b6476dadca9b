"""Muon: orthogonalised momentum, for the weight matrices of hidden layers."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array, Tree
from xformer.dispatch.checks import finite, number, require_sizes
from xformer.optim._checks import (
    in_dtype,
    learning_rate,
    require_matching,
    require_state,
    zeros,
)

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # steep at 0; values near 1 stay in about [0.7, 1.2]


@short
class MuonState(NamedTuple):
    """The momentum of Muon."""

    momentum: Any  # tree like params: running mean of the gradients


def muon_init(params: Any) -> MuonState:
    """The state before the first step: the momentum is 0.

    params: a tree of arrays (..., I, O), not empty: matrices or stacks of matrices
    ValueError if an array has fewer than two dimensions or no elements.
    """
    _require_matrices(params)
    return MuonState(zeros("muon", params))


def muon(
    params: Tree,
    grads: Tree,
    state: MuonState,
    *,
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    match_adamw: bool = False,
    ns_steps: int = 5,
    donate: bool = False,
) -> tuple[Tree, MuonState]:
    """w <- (1 - lr * weight_decay) w - lr * s * newton_schulz(u); as torch.optim.Muon.

    m <- momentum * m + (1 - momentum) g, then u = momentum * m + (1 - momentum) g if nesterov,
    else u = m (Jordan, "Muon", 2024). s = max(1, O / I)^1/2; torch stores weights as (O, I) and
    writes it as max(1, rows / columns)^1/2.

    Use it for the matrices inside blocks only. Embeddings, heads, biases and norms need AdamW (see
    `grouped`).

    params, grads: trees of the same structure, of matrices (I, O) or stacks of matrices
        (..., I, O), such as the weights of experts.
    match_adamw: if True, s = 0.2 max(I, O)^1/2, so that the lr and weight_decay of AdamW can be
        used (arXiv:2502.16982).
    ns_steps: the number of Newton-Schulz steps.
    donate: has no effect here.

    ValueError for parameters of fewer than two dimensions or without elements, negative numbers, a
    momentum outside [0, 1), and gradients of another shape than their parameters.
    """
    require_state("muon", state, MuonState)
    _require_matrices(params)
    for what, other in (("the gradient", grads), ("the momentum", state.momentum)):
        require_matching("muon", params, other, what)
    lr = learning_rate("muon", lr)
    mu = number("muon", "momentum", momentum)
    if not 0 <= mu < 1:
        raise ValueError(f"muon: momentum must lie in [0, 1), got {momentum}")
    keep = 1 - lr * finite("muon", "weight_decay", weight_decay, low=0)
    m = tree.map(lambda m, g: mu * m + (1 - mu) * g, state.momentum, grads)
    u = tree.map(lambda m, g: mu * m + (1 - mu) * g, m, grads) if nesterov else m

    def update(p: Array, u: Array) -> Array:
        rows, columns = p.shape[-2:]
        scale = 0.2 * max(rows, columns) ** 0.5 if match_adamw else max(1, columns / rows) ** 0.5
        step = newton_schulz(u, steps=ns_steps)
        return in_dtype(keep, p) * p - in_dtype(lr * scale, p) * step

    return tree.map(update, params, u), MuonState(m)


def newton_schulz(x: Array, *, steps: int = 5, eps: float = 1e-7) -> Array:
    """About U V^T of x = U S V^T: all singular values become about 1, between 0.7 and 1.2.

    x <- x / max(|x|, eps), and then `steps` times x <- a x + (b x x^T + c (x x^T)^2) x, with the
    coefficients a, b, c of Jordan, "Muon" (2024).

    x: (..., I, O)
    """
    (steps,) = require_sizes("newton_schulz", 1, steps=steps)
    xp = array_namespace(x)
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]  # transposed, so that x x^T is the smaller product
    if tall:
        x = xp.matrix_transpose(x)
    norm = xp.sqrt(xp.sum(x**2, axis=(-2, -1), keepdims=True))  # (..., 1, 1)
    x = x / xp.maximum(norm, xp.full_like(norm, eps))
    for _ in range(steps):
        gram = x @ xp.matrix_transpose(x)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return xp.matrix_transpose(x) if tall else x


def _require_matrices(params: Any) -> None:
    for name, p in tree.flatten(params).items():
        if p.ndim < 2 or 0 in p.shape:
            raise ValueError(
                f"muon: {name or 'params'} must be (..., I, O), got shape {tuple(p.shape)}"
            )
