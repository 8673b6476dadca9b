"""Lecture 5: AdamW, clipping, dropout, initial weights."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from xformer import initializers, ops, optim
from xformer.exercises.exercise import Exercise, Mistake, normal, of_op, unwritten
from xformer.ops import RandomKey

DEVIATION = (
    "sqrt(2 / (I + O)) is the standard deviation of Xavier's weights. The bound of a uniform "
    "distribution is sqrt(3) times as large: a = sqrt(6 / (I + O))"
)


def _adamw(p: Any, grad: Any, m: Any, v: Any, *, step: int, lr: float, **options: Any) -> Any:
    betas = options.pop("beta1"), options.pop("beta2")
    state = optim.AdamState(step - 1, m, v)
    p, (_, m, v) = optim.adamw(p, grad, state, lr=lr, betas=betas, **options)
    return p, m, v


def _moments(a: SimpleNamespace, grad: Any) -> tuple[Any, Any]:
    m = a.beta1 * a.m + (1 - a.beta1) * grad
    return m, a.beta2 * a.v + (1 - a.beta2) * grad**2


def _corrected(a: SimpleNamespace, grad: Any, step: int) -> tuple[Any, Any]:
    if step == 0:  # 1 - beta^0 is 0
        raise ValueError
    m, v = _moments(a, grad)
    return m / (1 - a.beta1**step), v / (1 - a.beta2**step)


def _stepped(a: SimpleNamespace, m: Any, v: Any, decay: float) -> dict[str, Any]:
    return {"p": (1 - decay) * a.p - a.lr * m / (np.sqrt(v) + a.eps)}


def _coupled(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    return _stepped(a, *_corrected(a, a.grad + a.weight_decay * a.p, a.step), 0)


def _eps_inside(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    mhat, vhat = _corrected(a, a.grad, a.step)
    return {"p": (1 - a.lr * a.weight_decay) * a.p - a.lr * mhat / np.sqrt(vhat + a.eps)}


def _adamw_case(step: int) -> Any:
    options = {"step": step, "lr": 0.1, "beta1": 0.9, "beta2": 0.97, "eps": 0.02}
    options["weight_decay"] = 0.3

    def draw(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        p, grad, m, v = rng.normal(size=(4, 3, 5))
        if step == 1:
            m, v = np.zeros_like(m), np.zeros_like(v)
        return {"p": p, "grad": grad, "m": m, "v": v**2}, options

    return draw


ADAMW_STEP = Exercise(
    name="adamw_step",
    summary="one step of AdamW",
    task="""Write one step of AdamW (arXiv:1711.05101, algorithm 2; arXiv:1412.6980, algorithm 1).

p, grad, m, v: arrays of one shape. step: 1 for the first one. Return the new (p, m, v).

    m <- beta1 m + (1 - beta1) grad,      mhat = m / (1 - beta1^step)
    v <- beta2 v + (1 - beta2) grad^2,    vhat = v / (1 - beta2^step)
    p <- p - lr weight_decay p - lr mhat / (sqrt(vhat) + eps)

m and v are returned without their corrections.
""",
    code=unwritten(
        "adamw_step(p, grad, m, v, *, step, lr, beta1, beta2, eps, weight_decay)",
        "The new (p, m, v).",
        "p, m, v",
        has_backward=False,
    ),
    reference=_adamw,
    draws={"the first step": _adamw_case(1), "step 3": _adamw_case(3)},
    source="xformer/optim/adam.py",
    page="docs/optimisers.md",
    outputs=("p", "m", "v"),
    has_backward=False,
    mistakes=(
        Mistake(
            "the corrections by 1 - beta^step are left out",
            lambda a, dy: _stepped(a, *_moments(a, a.grad), a.lr * a.weight_decay),
        ),
        Mistake("the decay goes through the moments: that is Adam with L2, not AdamW", _coupled),
        Mistake("eps is added to the root, not under it", _eps_inside),
        Mistake(
            "the first step is 1, not 0",
            lambda a, dy: _stepped(a, *_corrected(a, a.grad, a.step - 1), a.lr * a.weight_decay),
        ),
        Mistake(
            "the decay is multiplied by lr too",
            lambda a, dy: _stepped(a, *_corrected(a, a.grad, a.step), a.weight_decay),
        ),
        Mistake(
            "these are the corrected moments; return m and v themselves",
            lambda a, dy: {"m": _corrected(a, a.grad, a.step)[0]},
        ),
    ),
)


def _clip(grads: Any, *, max_norm: float) -> Any:
    return optim.clip_by_global_norm(grads, max_norm=max_norm)[0]


def _norm(grads: Any) -> float:
    return math.sqrt(sum(np.sum(g**2) for g in grads))


def _each_alone(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    return {"grads": [g * min(1, a.max_norm / (_norm([g]) + 1e-6)) for g in a.grads]}


def _always(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    return {"grads": [g * a.max_norm / (_norm(a.grads) + 1e-6) for g in a.grads]}


def _elements(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    return {"grads": [np.clip(g, -a.max_norm, a.max_norm) for g in a.grads]}


def _gradients(max_norm: float) -> Any:
    def draw(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        grads = [rng.normal(size=(3, 5)), rng.normal(size=(7,)), 3 * rng.normal(size=(2, 2))]
        return {"grads": grads}, {"max_norm": max_norm}

    return draw


CLIP = Exercise(
    name="clip",
    summary="clip gradients by their global norm",
    task="""Clip gradients by their global norm (arXiv:1211.5063, algorithm 1).

grads: a list of arrays of any shapes. Return a list of grads * min(1, max_norm / (norm + 1e-6)),
    norm = the root of the sum of the squares of all elements of all arrays
""",
    code='''

def clip(grads, *, max_norm):
    """The list of clipped gradients."""
    xp = array_namespace(*grads)
    raise NotImplementedError  # return a list
''',
    reference=_clip,
    draws={"a large norm": _gradients(1.5), "a small norm": _gradients(1000.0)},
    source="xformer/optim/clip.py",
    page="docs/optimisers.md",
    outputs=("grads",),
    has_backward=False,
    mistakes=(
        Mistake("there is one norm for all arrays together", _each_alone),
        Mistake("a norm below max_norm changes nothing: min(1, ...)", _always),
        Mistake("elements are clipped: the direction of the gradient changes", _elements),
    ),
)


def _keep(a: SimpleNamespace) -> Any:
    bits = ops.random_bits(a.x, key=a.key, size=a.x.size)
    return np.reshape(bits >= round(a.rate * 2**32), a.x.shape)


KEY = RandomKey(seed=7, step=3)
DROPOUT = Exercise(
    name="dropout",
    summary="dropout whose backward draws the mask again, forward and backward",
    task="""Write dropout with a counter-based mask, forward and backward (arXiv:1207.0580).

x, y: any shape.    y = x keep / (1 - rate); keep is 0 with probability rate

`ops.random_bits(x, key=key, size=n)` returns n words in [0, 2^32), the same for the same key. An
element is kept if its word is at least round(rate 2^32). `saved` needs no array: draw the words
again. (`math.prod(x.shape)` is the number of elements.)
""",
    code="import math\n\nfrom xformer import ops\n"
    + unwritten("dropout(x, *, rate, key)", "y = x * keep / (1 - rate)."),
    **of_op("dropout"),
    draws={
        "x (5, 7)": normal({"rate": 0.3, "key": KEY}, x=(5, 7)),
        "x (2, 3, 5)": normal({"rate": 0.5, "key": KEY}, x=(2, 3, 5)),
    },
    mistakes=(
        Mistake(
            "the factor 1 / (1 - rate) is missing",
            lambda a, dy: {"dx": np.where(_keep(a), dy, 0)},
        ),
        Mistake(
            "the factor 1 / (1 - rate) is missing",
            lambda a, dy: {"y": np.where(_keep(a), a.x, 0)},
        ),
        Mistake("the backward has no mask", lambda a, dy: {"dx": dy / (1 - a.rate)}),
        Mistake("the backward has no mask and no factor", lambda a, dy: {"dx": dy}),
        Mistake(
            "rate is the probability to drop, not to keep",
            lambda a, dy: {"y": np.where(_keep(a), 0, a.x / a.rate)},
        ),
        Mistake(
            "low words are dropped, high words are kept",
            lambda a, dy: {"y": np.where(_keep(a), 0, a.x / (1 - a.rate))},
        ),
    ),
)


class _FixedUniform:
    """A generator whose uniform numbers in [0, 1) are given."""

    def __init__(self, u: Any) -> None:
        self.u = u

    def uniform(self, shape: Any, *, low: float, high: float) -> Any:
        return low + (high - low) * self.u


def _xavier(u: Any) -> Any:
    generator: Any = _FixedUniform(u)
    return initializers.xavier_uniform(generator, u.shape)


def _deviation(a: SimpleNamespace) -> float:
    return math.sqrt(2 / sum(a.u.shape))


def _lopsided(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    return {"w": -_deviation(a) + (1 + _deviation(a)) * a.u}


INITIAL_WEIGHTS_MISTAKE = Exercise(
    name="initial_weights_mistake",
    function="initial_weights",
    summary="find the mistake in published initial weights",
    task="""Find the mistake. A published program has these initial weights, ascribed to Xavier.

u: (I, O), random numbers, uniform in [0, 1). Return weights (I, O) that are uniform in [-a, a) and
have the variance 2 / (I + O) of Glorot and Bengio (2010).
""",
    code='''

def initial_weights(u):
    """Weights (I, O) from uniform random numbers."""
    a = (2 / (u.shape[0] + u.shape[1])) ** 0.5
    return -a + 2 * a * u
''',
    reference=_xavier,
    draws={"u (5, 7)": lambda rng: ({"u": rng.random((5, 7))}, {})},
    source="xformer/initializers.py",
    page="docs/errata.md",
    outputs=("w",),
    has_backward=False,
    mistakes=(
        Mistake(DEVIATION, lambda a, dy: {"w": (2 * a.u - 1) * _deviation(a)}),
        Mistake("the weights are uniform in (-a, 1): the two bounds must be -a and a", _lopsided),
    ),
    planted=(DEVIATION,),
)

EXERCISES = (ADAMW_STEP, CLIP, DROPOUT, INITIAL_WEIGHTS_MISTAKE)
