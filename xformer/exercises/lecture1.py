"""Lecture 1: linear maps, ReLU, softmax."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from xformer.exercises.exercise import Exercise, Mistake, normal, of_op, unwritten
from xformer.exercises.formulas import rows, softmax, total

DIVIDED = (
    "dw and db are divided by the number of rows. A mean, if the loss has one, is in dy already"
)
ONE_MAXIMUM = (
    "one maximum is subtracted from all rows. A row far below it becomes 0 / 0: subtract the "
    "maximum of each row"
)


def _divided(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    n = len(rows(dy))
    return {"dw": rows(a.x).T @ rows(dy) / n, "db": np.sum(rows(dy), axis=0) / n}


def _normalised(e: Any) -> dict[str, Any]:
    return {"y": e / total(e)}


LINEAR_FORWARD = '''

def linear(x, w, b):
    """y = x w + b over the last axis."""
    return x @ w + b, (x, w)
'''

LINEAR = Exercise(
    name="linear",
    summary="backward of y = x w + b",
    task="""Write the backward of a linear map.

x (..., I), w (I, O), b (O) -> y (..., O).    y = x w + b

Any number of axes may precede the last one of x. Each position along them is a row; all rows use
the same w and b. The forward is given.
""",
    code=LINEAR_FORWARD
    + '''

def linear_backward(dy, saved):
    """(dx, dw, db), in the shapes of x, w and b."""
    x, w = saved
    xp = array_namespace(dy)
    raise NotImplementedError  # return dx, dw, db
''',
    **of_op("linear"),
    draws={
        "x (5, 3)": normal(x=(5, 3), w=(3, 7), b=(7,)),
        "x (2, 3, 5)": normal(x=(2, 3, 5), w=(5, 7), b=(7,)),
        "square w": normal(x=(5, 4), w=(4, 4), b=(4,)),
    },
    mistakes=(
        Mistake(DIVIDED, _divided, "004-divided-by-rows"),
        Mistake(
            "the number of the column is added in the place of b",
            lambda a, dy: {"y": a.x @ a.w + np.arange(len(a.b))},
            "004-column-number",
        ),
        Mistake("w must be transposed: dx = dy w^T", lambda a, dy: {"dx": dy @ a.w}),
    ),
)

RELU = Exercise(
    name="relu",
    summary="y = max(0, x), forward and backward",
    task="""Write the rectified linear unit, forward and backward.

x, y: any shape, the same.    y = max(0, x), elementwise. The derivative at 0 is defined as 0.
""",
    code=unwritten("relu(x)", "y = max(0, x)."),
    **of_op("relu"),
    draws={"x (5, 7)": normal(x=(5, 7)), "x (2, 3, 5)": normal(x=(2, 3, 5))},
    mistakes=(
        Mistake("dy must pass only where x > 0", lambda a, dy: {"dx": dy}),
        Mistake(
            "this is the derivative y > 0 alone: multiply it by dy",
            lambda a, dy: {"dx": (a.x > 0) + 0.0},
        ),
        Mistake("the mask is of dy, not of x: max(0, dy)", lambda a, dy: {"dx": np.maximum(dy, 0)}),
    ),
)

SOFTMAX = Exercise(
    name="softmax",
    summary="softmax that does not overflow, forward and backward",
    task="""Write softmax over the last axis, forward and backward.

x, y: (..., V).    y_i = exp(x_i) / sum_j exp(x_j)

The check also has numbers near 1000, of which exp overflows, and rows far below others. What may be
subtracted from a row without changing y?
""",
    code=unwritten("softmax(x)", "y = exp(x) / sum(exp(x)) over the last axis."),
    **of_op("softmax"),
    draws={
        "x (5, 7)": normal(x=(5, 7)),
        "x (2, 3, 5)": normal(x=(2, 3, 5)),
        "large numbers": lambda rng: (
            {"x": rng.normal(size=(3, 5)) + np.array([[1000.0], [0.0], [-1000.0]])},
            {},
        ),
    },
    mistakes=(
        Mistake(ONE_MAXIMUM, lambda a, dy: _normalised(np.exp(a.x - np.max(a.x)))),
        Mistake(
            "exp overflows: subtract the maximum of each row first",
            lambda a, dy: _normalised(np.exp(a.x)),
        ),
        Mistake(
            "this is the diagonal of the Jacobian alone: y_i also depends on x_j",
            lambda a, dy: {"dx": softmax(a.x) * (1 - softmax(a.x)) * dy},
        ),
        Mistake(
            "the sum is of dy * y, not of dy",
            lambda a, dy: {"dx": softmax(a.x) * (dy - total(dy))},
        ),
        Mistake(
            "the factor y is missing: dx = y * (dy - sum(dy * y))",
            lambda a, dy: {"dx": dy - total(dy * softmax(a.x))},
        ),
        Mistake(
            "the sum is missing: dx = y * (dy - sum(dy * y))",
            lambda a, dy: {"dx": dy * softmax(a.x)},
        ),
    ),
)

LINEAR_MISTAKE = replace(
    LINEAR,
    name="linear_mistake",
    function="linear",
    summary="find the mistake in a published backward of a linear map",
    task="""Find the mistake. A published program has this backward of a linear map.

x (..., I), w (I, O), b (O) -> y (..., O).    y = x w + b
""",
    code=LINEAR_FORWARD
    + '''

def linear_backward(dy, saved):
    """(dx, dw, db), in the shapes of x, w and b."""
    x, w = saved
    xp = array_namespace(dy)
    x_rows = xp.reshape(x, (-1, x.shape[-1]))
    dy_rows = xp.reshape(dy, (-1, dy.shape[-1]))
    dx = dy @ w.T
    dw = x_rows.T @ dy_rows / x_rows.shape[0]
    db = xp.mean(dy_rows, axis=0)
    return dx, dw, db
''',
    planted=(DIVIDED,),
)

SOFTMAX_MISTAKE = replace(
    SOFTMAX,
    name="softmax_mistake",
    function="softmax",
    summary="find the mistake in a published softmax",
    task="""Find the mistake. A published notebook has this softmax.

x, y: (..., V).    y_i = exp(x_i) / sum_j exp(x_j)
""",
    code='''

def softmax(x):
    """y = exp(x) / sum(exp(x)) over the last axis."""
    xp = array_namespace(x)
    e = xp.exp(x - xp.max(x))
    y = e / xp.sum(e, axis=-1, keepdims=True)
    return y, y


def softmax_backward(dy, saved):
    """dx, in the shape of x."""
    xp, y = array_namespace(dy), saved
    return y * (dy - xp.sum(dy * y, axis=-1, keepdims=True))
''',
    planted=(ONE_MAXIMUM,),
)

EXERCISES = (LINEAR, RELU, SOFTMAX, LINEAR_MISTAKE, SOFTMAX_MISTAKE)
