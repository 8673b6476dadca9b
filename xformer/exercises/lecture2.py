"""Lecture 2: layer norm, RMS norm, cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from xformer.exercises.exercise import Exercise, Formula, Mistake, normal, of_op, unwritten
from xformer.exercises.formulas import mean, rows, softmax, total

AS_PRINTED = (
    "five mistakes: xhat is taken after w and b; w is left out of dxhat; sum(dxhat) stands in the "
    "place of sum(dxhat * xhat); it is divided by var + eps, not by the root; and var is that of y"
)


def _norm_dx(wrong: Callable[[SimpleNamespace], Any]) -> Formula:
    """A wrong dx of layer_norm, from its inputs and eps, dy, xhat, rstd, y, and g = dy * w."""

    def formula(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
        rstd = 1 / np.sqrt(np.var(a.x, axis=-1, keepdims=True) + a.eps)
        xhat = (a.x - mean(a.x)) * rstd
        parts = {"dy": dy, "xhat": xhat, "rstd": rstd, "y": xhat * a.w + a.b, "g": dy * a.w}
        return {"dx": wrong(SimpleNamespace(**vars(a) | parts))}

    return formula


def _projected(g: Any, xhat: Any) -> Any:
    """The right dx / rstd, for the right arguments."""
    return g - mean(g) - xhat * mean(g * xhat)


def _var_of_y(p: SimpleNamespace) -> Any:
    return np.var(p.y, axis=-1, keepdims=True) + p.eps


def _by_x(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    return {"dw": np.sum(rows(dy * a.x), axis=0)}


def _forward(a: SimpleNamespace, deviation: Any) -> dict[str, Any]:
    return {"y": (a.x - mean(a.x)) / deviation * a.w + a.b}


EPS = {"eps": 0.1}
LAYER_NORM = Exercise(
    name="layer_norm",
    summary="backward of layer normalisation: through a mean and a variance",
    task="""Write the backward of layer normalisation.

x, y: (..., D);  w, b: (D,).    y = w * xhat + b,  xhat = (x - mean) / sqrt(var + eps)

mean and var are of each row over the last axis. Each element of a row changes both. The forward is
given; change `saved` if you want to save something else.
""",
    code='''

def layer_norm(x, w, b, *, eps):
    """y = w * xhat + b over the last axis."""
    xp = array_namespace(x)
    mean = xp.mean(x, axis=-1, keepdims=True)
    var = xp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    rstd = 1 / xp.sqrt(var + eps)
    return w * (x - mean) * rstd + b, (x, w, mean, rstd)


def layer_norm_backward(dy, saved):
    """(dx, dw, db), in the shapes of x, w and b."""
    x, w, mean, rstd = saved
    xp = array_namespace(dy)
    raise NotImplementedError  # return dx, dw, db
''',
    **of_op("layer_norm"),
    draws={
        "x (5, 7)": normal(EPS, x=(5, 7), w=(7,), b=(7,)),
        "x (2, 3, 5)": normal(EPS, x=(2, 3, 5), w=(5,), b=(5,)),
    },
    mistakes=(
        Mistake(
            "xhat must be the normalised input, before w and b; this takes y",
            _norm_dx(lambda p: p.rstd * _projected(p.g, p.y)),
            "000-norm-xhat",
        ),
        Mistake(
            "w is left out: dxhat = dy * w",
            _norm_dx(lambda p: p.rstd * _projected(p.dy, p.xhat)),
            "000-norm-gamma",
        ),
        Mistake(
            "mean(dxhat) stands in the place of mean(dxhat * xhat)",
            _norm_dx(lambda p: p.rstd * (p.g - mean(p.g) - p.xhat * mean(p.g))),
            "000-norm-sum",
        ),
        Mistake(
            "it is divided by var + eps: divide by sqrt(var + eps)",
            _norm_dx(lambda p: p.rstd**2 * _projected(p.g, p.xhat)),
            "000-norm-root",
        ),
        Mistake(
            "the variance is that of y: it must be that of the rows of x",
            _norm_dx(lambda p: _projected(p.g, p.xhat) / np.sqrt(_var_of_y(p))),
            "000-norm-rows",
        ),
        Mistake(
            AS_PRINTED,
            _norm_dx(lambda p: (p.dy - mean(p.dy) - p.y * mean(p.dy)) / _var_of_y(p)),
            "000-norm-as-printed",
        ),
        Mistake(
            "the term -xhat * mean(dxhat * xhat) is missing: var depends on x",
            _norm_dx(lambda p: p.rstd * (p.g - mean(p.g))),
        ),
        Mistake(
            "mean and var depend on x too: two terms are missing", _norm_dx(lambda p: p.rstd * p.g)
        ),
        Mistake("dw is the sum of dy * xhat, not of dy * x", _by_x),
        Mistake(
            "eps belongs inside the root: sqrt(var + eps)",
            lambda a, dy: _forward(a, np.std(a.x, axis=-1, keepdims=True) + a.eps),
        ),
        Mistake(
            "the variance is divided by D, not by D - 1",
            lambda a, dy: _forward(a, np.sqrt(np.var(a.x, axis=-1, keepdims=True, ddof=1) + a.eps)),
        ),
    ),
)


def _rms(a: SimpleNamespace) -> tuple[Any, Any]:
    rstd = 1 / np.sqrt(mean(a.x**2) + a.eps)
    return a.x * rstd, rstd


def _rms_without_w(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    xhat, rstd = _rms(a)
    return {"dx": rstd * (dy - xhat * mean(dy * xhat))}


def _rms_constant(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    return {"dx": _rms(a)[1] * dy * a.w}


def _rms_sum(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    xhat, rstd = _rms(a)
    return {"dx": rstd * (dy * a.w - xhat * total(dy * a.w * xhat))}


def _centred(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    c = a.x - mean(a.x)
    return {"y": c / np.sqrt(mean(c**2) + a.eps) * a.w}


RMS_NORM = Exercise(
    name="rms_norm",
    summary="RMS normalisation, forward and backward",
    task="""Write RMS normalisation, forward and backward.

x, y: (..., D);  w: (D,).    y = w * x / sqrt(mean(x^2) + eps), mean over the last axis
""",
    code=unwritten(
        "rms_norm(x, w, *, eps)", "y = w * x / sqrt(mean(x^2) + eps) over the last axis."
    ),
    **of_op("rms_norm"),
    draws={
        "x (5, 7)": normal(EPS, x=(5, 7), w=(7,)),
        "x (2, 3, 5)": normal(EPS, x=(2, 3, 5), w=(5,)),
    },
    mistakes=(
        Mistake("w is left out: dxhat = dy * w", _rms_without_w),
        Mistake("the root depends on x too: a term is missing", _rms_constant),
        Mistake("the sum of dxhat * xhat must be a mean", _rms_sum),
        Mistake("no mean is subtracted here: that is layer_norm", _centred),
        Mistake("dw is the sum of dy * xhat, not of dy * x", _by_x),
    ),
)


def _targets(rng: np.random.Generator, shape: tuple[int, ...], size: int) -> dict[str, Any]:
    return {"targets": rng.integers(0, size, shape)}


def _one_hot(a: SimpleNamespace) -> Any:
    return np.eye(a.logits.shape[-1])[a.targets]


def _losses(a: SimpleNamespace) -> Any:
    x = a.logits - np.max(a.logits, axis=-1, keepdims=True)
    return np.log(np.sum(np.exp(x), axis=-1)) - np.sum(x * _one_hot(a), axis=-1)


def _log_of_exp(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    lse = np.log(np.sum(np.exp(a.logits), axis=-1))
    return {"loss": np.mean(lse - np.sum(a.logits * _one_hot(a), axis=-1))}


CROSS_ENTROPY = Exercise(
    name="cross_entropy",
    summary="the loss of a language model, forward and backward",
    task="""Write the cross-entropy of logits and targets, forward and backward.

logits (..., V), targets (...) integers in [0, V) -> loss (), the mean over all tokens of
    log(sum_j exp(logits_j)) - logits_target

Targets have no gradient. dy is the gradient of a later loss with respect to this one: a number, not
always 1. The check also has logits near 1000. `targets[..., None] == xp.arange(V)` marks targets;
`xp.astype(marks, logits.dtype)` makes numbers of it.
""",
    code=unwritten(
        "cross_entropy(logits, *, targets)",
        "The mean of log(sum(exp(logits))) - logits[target], an array of shape ().",
        "loss, saved",
    ),
    **of_op("cross_entropy"),
    draws={
        "logits (5, 7)": normal(lambda rng: _targets(rng, (5,), 7), logits=(5, 7)),
        "logits (2, 3, 5)": normal(lambda rng: _targets(rng, (2, 3), 5), logits=(2, 3, 5)),
        "large numbers": lambda rng: (
            {"logits": rng.normal(size=(3, 5)) + 1000},
            _targets(rng, (3,), 5),
        ),
    },
    outputs=("loss",),
    mistakes=(
        Mistake(
            "the loss must be one number: the mean over tokens", lambda a, dy: {"loss": _losses(a)}
        ),
        Mistake("exp overflows: subtract the maximum of each row first", _log_of_exp),
        Mistake(
            "the 1 of the target is missing: dlogits = (probs - [target]) dy / N",
            lambda a, dy: {"dlogits": softmax(a.logits) * dy / a.targets.size},
        ),
        Mistake(
            "dy is left out, and the loss is a mean: dlogits = (probs - [target]) dy / N",
            lambda a, dy: {"dlogits": softmax(a.logits) - _one_hot(a)},
        ),
        Mistake(
            "dy is left out",
            lambda a, dy: {"dlogits": (softmax(a.logits) - _one_hot(a)) / a.targets.size},
        ),
        Mistake(
            "this is the derivative of -log(probs[target]) by probs: the softmax is left out",
            lambda a, dy: {"dlogits": -_one_hot(a) / softmax(a.logits) * dy / a.targets.size},
        ),
    ),
)

LAYER_NORM_MISTAKE = replace(
    LAYER_NORM,
    name="layer_norm_mistake",
    function="layer_norm",
    summary="find five mistakes in a published backward of layer normalisation",
    task="""Find five mistakes. A published notebook has this backward for x.

x, y: (..., D);  w, b: (D,).    y = w * xhat + b,  xhat = (x - mean) / sqrt(var + eps)

mean and var are of each row over the last axis. dw and db are right.
""",
    code='''

def layer_norm(x, w, b, *, eps):
    """y = w * xhat + b over the last axis."""
    xp = array_namespace(x)
    mean = xp.mean(x, axis=-1, keepdims=True)
    var = xp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    rstd = 1 / xp.sqrt(var + eps)
    y = w * (x - mean) * rstd + b
    return y, (x, w, mean, rstd, y, eps)


def layer_norm_backward(dy, saved):
    """(dx, dw, db), in the shapes of x, w and b."""
    x, w, mean, rstd, y, eps = saved
    xp, size = array_namespace(dy), x.shape[-1]
    xhat, dxhat = y, dy
    var = xp.var(y, axis=-1, keepdims=True)
    total = xp.sum(dxhat, axis=-1, keepdims=True)
    dx = (size * dxhat - total - xhat * total) / (size * (var + eps))
    rows = tuple(range(dy.ndim - 1))
    dw = xp.sum(dy * (x - mean) * rstd, axis=rows)
    db = xp.sum(dy, axis=rows)
    return dx, dw, db
''',
    planted=(AS_PRINTED,),
)

EXERCISES = (LAYER_NORM, RMS_NORM, CROSS_ENTROPY, LAYER_NORM_MISTAKE)
