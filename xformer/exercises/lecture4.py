"""Lecture 4: embedding, feed-forward network, residual block."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from xformer import layers, ops
from xformer.exercises.exercise import Exercise, Mistake, normal, of_op, unwritten
from xformer.exercises.formulas import mean, rows

BY_KEYS = (
    "dy is masked, by an array that happens to have its shape, before w2^T: "
    "dhidden = (dy w2^T) * (hidden > 0)"
)
NO_RESIDUAL = "x goes past the sublayer too: dx needs a second term, dy"
BY_INPUT = "w multiplies the norm of x, not x: dw is norm(x)^T dy"


def _last_wins(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    d = np.zeros_like(a.table)
    d[a.ids] = dy
    return {"dtable": d}


def _averaged(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    d, counts = np.zeros_like(a.table), np.bincount(a.ids.ravel(), minlength=len(a.table))
    np.add.at(d, a.ids, dy)
    return {"dtable": d / np.maximum(counts, 1)[:, None]}


EMBEDDING = Exercise(
    name="embedding",
    summary="look-up in a table; ids that appear several times",
    task="""Write the look-up of an embedding, forward and backward.

table (V, D), ids (...) integers in [0, V) -> y (..., D).    y = table[ids]

Some ids appear several times, some never. `xp.take(table, i, axis=0)` takes rows; i has one axis.
Look-up is a product with a one-hot matrix: `i[:, None] == xp.arange(V)`, made numbers by
`xp.astype(marks, table.dtype)`. So the backward is a product too.
""",
    code=unwritten("embedding(table, *, ids)", "y = table[ids]."),
    **of_op("embedding"),
    draws={
        "ids (11,)": normal(lambda rng: {"ids": rng.integers(0, 7, 11)}, table=(7, 3)),
        "ids (3, 5)": normal(lambda rng: {"ids": rng.integers(0, 4, (3, 5))}, table=(5, 2)),
    },
    mistakes=(
        Mistake("an id that appears several times gets the sum, not the last of them", _last_wins),
        Mistake("an id that appears several times gets the sum, not the mean", _averaged),
    ),
)


def _feed_forward(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> tuple[Any, Any]:
    params = layers.FeedForwardParams(layers.LinearParams(w1, b1), layers.LinearParams(w2, b2))
    cache: Any
    y, cache = layers.feed_forward(x, params)

    def backward(dy: Any) -> Any:
        dx, d = cache.backward(dy)
        return dx, d.up.w, d.up.b, d.down.w, d.down.b

    return y, SimpleNamespace(backward=backward)


def _pre(a: SimpleNamespace) -> Any:
    return a.x @ a.w1 + a.b1


def _through(a: SimpleNamespace, dpre: Any) -> dict[str, Any]:
    """Gradients of x, w1 and b1 if that of x w1 + b1 is this."""
    dw1 = rows(a.x).T @ rows(dpre)
    return {"dx": dpre @ a.w1.T, "dw1": dw1, "db1": np.sum(rows(dpre), axis=0)}


def _second_max(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    hidden = np.maximum(_pre(a), 0)
    dy = dy * (hidden @ a.w2 + a.b2 > 0)
    down = {"dw2": rows(hidden).T @ rows(dy), "db2": np.sum(rows(dy), axis=0)}
    return down | _through(a, dy @ a.w2.T * (_pre(a) > 0))


def _relu_before(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    dpre = dy @ a.w2.T * (_pre(a) > 0)
    dw1 = rows(np.maximum(a.x, 0)).T @ rows(dpre)
    return {"dx": dpre @ a.w1.T * (a.x > 0), "dw1": dw1}


FEED_FORWARD = Exercise(
    name="feed_forward",
    summary="two linear maps with ReLU between them, forward and backward",
    task="""Write the feed-forward network, forward and backward.

x, y: (B, T, D);  w1 (D, F), b1 (F,), w2 (F, D), b2 (D,).    y = max(0, x w1 + b1) w2 + b2
""",
    code=unwritten("feed_forward(x, w1, b1, w2, b2)", "y = max(0, x w1 + b1) w2 + b2."),
    reference=_feed_forward,
    draws={"x (2, 3, 5), F 7": normal(x=(2, 3, 5), w1=(5, 7), b1=(7,), w2=(7, 5), b2=(5,))},
    source="xformer/layers/feed_forward.py",
    page="docs/derivations/relu.md",
    mistakes=(
        Mistake("nothing is rectified after w2: dy is not masked", _second_max, "000-second-max"),
        Mistake(BY_KEYS, lambda a, dy: _through(a, (dy * (a.x > 0)) @ a.w2.T), "000-mask-by-keys"),
        Mistake(
            "the backward of ReLU is left out: dhidden = (dy w2^T) * (hidden > 0)",
            lambda a, dy: _through(a, dy @ a.w2.T),
            "000-no-relu",
        ),
        Mistake("ReLU is after x w1 + b1, not before it", _relu_before, "000-relu-before"),
        Mistake(
            "the hidden layer is taken before ReLU: dw2 = max(0, x w1 + b1)^T dy",
            lambda a, dy: {"dw2": rows(_pre(a)).T @ rows(dy)},
        ),
    ),
)


def _residual_block(x: Any, gamma: Any, beta: Any, w: Any) -> tuple[Any, Any]:
    h, norm = ops.layer_norm(x, gamma, beta)
    a, linear = ops.linear(h, w)

    def backward(dy: Any) -> Any:
        dh, dw, _ = linear.backward(dy)
        dx, dgamma, dbeta = norm.backward(dh)
        return dx + dy, dgamma, dbeta, dw

    return x + a, SimpleNamespace(backward=backward)


def _normed(a: SimpleNamespace) -> Any:
    c = a.x - mean(a.x)
    return c / np.sqrt(mean(c**2) + 1e-5) * a.gamma + a.beta


def _left_out(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    _, cache = _residual_block(a.x, a.gamma, a.beta, a.w)
    return {"dx": cache.backward(dy)[0] - dy}


RESIDUAL_BLOCK = Exercise(
    name="residual_block",
    summary="backward of x + f(norm(x)): two paths to x",
    task="""Write the backward of a pre-norm block whose sublayer is one linear map.

x, y: (B, T, D);  gamma, beta: (D,);  w: (D, D).    y = x + layer_norm(x; gamma, beta) w

The forward is given. It keeps the caches of our ops: `cache.backward(dy)` returns the gradients of
the op's inputs.
""",
    code='''from xformer import ops


def residual_block(x, gamma, beta, w):
    """y = x + layer_norm(x) w."""
    h, norm = ops.layer_norm(x, gamma, beta)
    a, linear = ops.linear(h, w)
    return x + a, (norm, linear)


def residual_block_backward(dy, saved):
    """(dx, dgamma, dbeta, dw)."""
    norm, linear = saved
    dh, dw, _ = linear.backward(dy)  # the third is the gradient of a bias
    raise NotImplementedError  # return dx, dgamma, dbeta, dw
''',
    reference=_residual_block,
    draws={"x (2, 3, 5)": normal(x=(2, 3, 5), gamma=(5,), beta=(5,), w=(5, 5))},
    source="xformer/layers/residual.py",
    page="docs/lesson.md",
    mistakes=(
        Mistake(NO_RESIDUAL, _left_out, "002-residual-left-out"),
        Mistake(
            "the backward stops before the norm: dx = norm.backward(dy w^T) + dy",
            lambda a, dy: {"dx": dy + dy @ a.w.T},
            "002-first-norm-left-out",
        ),
        Mistake(BY_INPUT, lambda a, dy: {"dw": rows(a.x).T @ rows(dy)}, "002-weights-by-x"),
        Mistake(
            "the block adds x itself, not its norm",
            lambda a, dy: {"y": _normed(a) + _normed(a) @ a.w},
        ),
    ),
)

FEED_FORWARD_MISTAKE = replace(
    FEED_FORWARD,
    name="feed_forward_mistake",
    function="feed_forward",
    summary="find the mistake in a published backward of a feed-forward network",
    task="""Find the mistake. A published notebook has this backward of the feed-forward network.

x, y: (B, T, D);  w1 (D, F), b1 (F,), w2 (F, D), b2 (D,).    y = max(0, x w1 + b1) w2 + b2

There, the array of the mask was called K, and K was the name of two things.
""",
    code='''

def feed_forward(x, w1, b1, w2, b2):
    """y = max(0, x w1 + b1) w2 + b2."""
    xp = array_namespace(x)
    hidden = x @ w1 + b1
    hidden = xp.where(hidden > 0, hidden, 0.0)
    return hidden @ w2 + b2, (x, w1, hidden, w2)


def feed_forward_backward(dy, saved):
    """(dx, dw1, db1, dw2, db2)."""
    x, w1, hidden, w2 = saved
    xp = array_namespace(dy)
    dhidden = xp.where(x > 0, dy, 0.0) @ w2.T
    dw1, dw2 = xp.sum(x.mT @ dhidden, axis=0), xp.sum(hidden.mT @ dy, axis=0)
    return dhidden @ w1.T, dw1, xp.sum(dhidden, axis=(0, 1)), dw2, xp.sum(dy, axis=(0, 1))
''',
    planted=(BY_KEYS,),
)

RESIDUAL_BLOCK_MISTAKE = replace(
    RESIDUAL_BLOCK,
    name="residual_block_mistake",
    function="residual_block",
    summary="find two mistakes in a published backward of a block",
    task="""Find two mistakes. A published notebook has this backward of a block.

x, y: (B, T, D);  gamma, beta: (D,);  w: (D, D).    y = x + layer_norm(x; gamma, beta) w
""",
    code='''from xformer import ops


def residual_block(x, gamma, beta, w):
    """y = x + layer_norm(x) w."""
    h, norm = ops.layer_norm(x, gamma, beta)
    a, linear = ops.linear(h, w)
    return x + a, (x, norm, linear)


def residual_block_backward(dy, saved):
    """(dx, dgamma, dbeta, dw)."""
    x, norm, linear = saved
    xp = array_namespace(dy)
    dh, _, _ = linear.backward(dy)
    dx, dgamma, dbeta = norm.backward(dh)
    return dx, dgamma, dbeta, xp.sum(x.mT @ dy, axis=0)
''',
    planted=(NO_RESIDUAL, BY_INPUT),
)

EXERCISES = (
    EMBEDDING,
    FEED_FORWARD,
    RESIDUAL_BLOCK,
    FEED_FORWARD_MISTAKE,
    RESIDUAL_BLOCK_MISTAKE,
)
