"""Adafactor: Adam's second moments, approximated by the means of their rows and columns."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array, Tree
from xformer.dispatch.checks import finite, number
from xformer.optim._checks import (
    in_dtype,
    learning_rate,
    require_arrays,
    require_matching,
    require_state,
)


@short
class AdafactorState(NamedTuple):
    """Running means of squared gradients. A matrix (I, O) needs I + O numbers, not I * O."""

    step: int  # the number of steps so far
    rows: Any  # tree like params: (..., I), the mean of each row; a vector is one column
    columns: Any  # tree like params: (..., O), the mean of each column


def adafactor_init(params: Any) -> AdafactorState:
    """The state before the first step: all means are 0."""
    require_arrays("adafactor", tree.flatten(params))

    def zeros(p: Array) -> Array:
        return array_namespace(p).zeros_like(p)

    rows = tree.map(lambda p: _row_means(zeros(p)), params)
    return AdafactorState(0, rows, tree.map(lambda p: _column_means(zeros(p)), params))


def adafactor(
    params: Tree,
    grads: Tree,
    state: AdafactorState,
    *,
    lr: float,
    decay: float = 0.8,
    clip: float = 1.0,
    eps: tuple[float, float] = (1e-30, 1e-3),
    relative: bool = False,
    weight_decay: float = 0.0,
    donate: bool = False,
) -> tuple[Tree, AdafactorState]:
    """p <- (1 - a * weight_decay) p - a * u / max(1, rms(u) / clip) (arXiv:1804.04235, alg. 4, 5).

    u = g / v^1/2 and v = row column / mean(row). row and column are running means of g^2 + eps[0].
    At step t, a running mean keeps the fraction 1 - t^-decay of its old value.
    There is no first moment.

    params, grads: trees of the same structure; (..., I, O) is a stack of matrices.
    relative: if True, a = lr * max(eps[1], rms(p)), else a = lr. The paper uses the relative form
        with lr = min(0.01, t^-1/2). In transformers' Adafactor this option is `scale_parameter`.
    donate: has no effect here.

    ValueError for negative numbers, a clip of 0, and gradients of another shape than their
    parameters.
    """
    lr = learning_rate("adafactor", lr)
    weight_decay = finite("adafactor", "weight_decay", weight_decay, low=0)
    tiny, least = _two_eps(eps)
    clip = number("adafactor", "clip", clip, low=0)
    if clip == 0:
        raise ValueError(f"adafactor: clip must be positive, got {clip}")
    require_state("adafactor", state, AdafactorState)
    require_matching("adafactor", params, grads)
    t = state.step + 1
    new = t ** -number("adafactor", "decay", decay, low=0)
    squares = tree.map(lambda g: g**2 + tiny, grads)
    rows = _running("rows", state.rows, tree.map(_row_means, squares), new)
    columns = _running("columns", state.columns, tree.map(_column_means, squares), new)

    def update(p: Array, g: Array, row: Array, column: Array) -> Array:
        if 0 in p.shape:
            return p
        xp = array_namespace(p)
        root = (row / xp.mean(row, axis=-1, keepdims=True)) ** 0.5  # (..., I)
        u = g / xp.reshape(root[..., :, None] * column[..., None, :] ** 0.5, p.shape)
        a = in_dtype(lr, p) * (_at_least(least, _rms(p)) if relative else 1.0)
        return (1 - a * weight_decay) * p - a / _at_least(1.0, _rms(u) / clip) * u

    params = tree.map(update, params, grads, rows, columns)
    return params, AdafactorState(t, rows, columns)


def _running(what: str, old: Any, means: Any, new: Any) -> Any:
    """The running means after this step."""
    require_matching("adafactor", means, old, f"the {what}")

    def moved(old: Array, mean: Array) -> Array:
        share = in_dtype(new, old)
        return (1 - share) * old + share * mean

    return tree.map(moved, old, means)


def _matrix(p: Array) -> Array:
    """p as (..., I, O). A vector or a scalar becomes a matrix of one column."""
    return p if p.ndim > 1 else array_namespace(p).reshape(p, (-1, 1))


def _row_means(p: Array) -> Array:
    return _mean(_matrix(p), -1)


def _column_means(p: Array) -> Array:
    return _mean(_matrix(p), -2)


def _mean(x: Array, axis: int) -> Array:
    """The mean over an axis; 0 if the axis is empty."""
    return array_namespace(x).sum(x, axis=axis) / max(x.shape[axis], 1)


def _rms(p: Array) -> Array:
    return array_namespace(p).mean(p**2) ** 0.5


def _at_least(low: float, x: Array) -> Array:
    xp = array_namespace(x)
    return xp.maximum(x, xp.full_like(x, low))


def _two_eps(eps: Any) -> tuple[float, float]:
    if not isinstance(eps, tuple | list) or len(eps) != 2:
        raise TypeError(f"adafactor: eps must be two numbers, got {eps!r}")
    tiny, least = (number("adafactor", "eps", value, low=0) for value in eps)
    return tiny, least
