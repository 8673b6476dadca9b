"""Errors of ops over the range of their argument, against numbers of 50 digits.

The limit of an error is some roundings of the result and of the argument. A formula that cancels,
such as log(1 + e^x) for a small e^x, exceeds it by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from array_api_compat import array_namespace

import xformer as xf
from xformer import layers, ops
from xformer.dispatch import reference_only
from xformer.ops.activation import ACTIVATIONS, GATED
from xformer.ops.clamped_swiglu import LIMIT
from xformer.ops.gelu import CUBIC, SCALE
from xformer.ops.quick_gelu import SLOPE

mpmath = pytest.importorskip("mpmath", reason="mpmath is not installed")

ROUNDINGS = 16  # of the argument and of the result, that a result may be wrong by
N = 100  # sizes of the argument
TINY = 2.0**20  # smallest normal numbers, which count as 0: numba's exp2 is at most 2^127
RATE = 0.25  # log_rate of `log_decay`
CAP = 30.0


class Op(NamedTuple):
    """A function of one number.

    of_x: the op   exact, slope: the function and its derivative, on numbers of mpmath
    y, dx: the absolute errors that are allowed beside `ROUNDINGS`, in roundings of 1
    """

    of_x: Callable[[Any], Any]
    exact: Callable[[Any], Any]
    slope: Callable[[Any], Any]
    y: float = 0.0
    dx: float = 0.0


def logistic(x: Any) -> Any:
    return 1 / (1 + mpmath.exp(-x))


def swish(c: float, x: Any) -> Any:
    return x * logistic(c * x)


def d_swish(c: float, x: Any) -> Any:
    s = logistic(c * x)
    return s * (1 + c * x * logistic(-c * x))


def gelu(x: Any) -> Any:
    return x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def d_gelu(x: Any) -> Any:
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2 + x * mpmath.npdf(x)


def gelu_tanh(x: Any) -> Any:
    return x * logistic(2 * SCALE * (x + CUBIC * x**3))


def d_gelu_tanh(x: Any) -> Any:
    u = 2 * SCALE * (x + CUBIC * x**3)
    return logistic(u) * (1 + x * logistic(-u) * 2 * SCALE * (1 + 3 * CUBIC * x * x))


def softplus(x: Any) -> Any:
    return mpmath.log1p(mpmath.exp(x))


def log_decay(x: Any) -> Any:
    return ops.log_decay(x[:, None], x[:1] * 0 + RATE)


def splade(saturation: str, x: Any) -> Any:
    return layers.splade(x[:, None, None], saturation=saturation)


def glu(activation: str, gate: Any) -> Any:
    return ops.glu(gate[:, None], gate[:, None] * 0 + 1, activation=activation)


def clamped_swiglu(gate: Any) -> Any:
    return ops.clamped_swiglu(gate[:, None], gate[:, None] * 0)


def first_of_two(softmax: Any, x: Any) -> Any:
    """The first of two probabilities, or its logarithm, of the logits x and 0."""
    xp = array_namespace(x)
    y, cache = softmax(xp.stack([x, x * 0], axis=1))
    return y[:, 0], FirstCache(cache)


class FirstCache(NamedTuple):
    cache: Any

    def backward(self, dy: Any) -> Any:
        return self.cache.backward(array_namespace(dy).stack([dy, dy * 0], axis=1))[:, 0]


# `tanh`, `sigmoid` and `softcap` compute the derivative from y, whose rounding it inherits. The
# error function is at most 1, and so is the rounding of Phi = (1 + erf) / 2. x (1 - s) in the
# derivative of `silu` has a rounding of x. All three as in torch.
OPS = {
    "relu": Op(ops.relu, lambda x: max(x, 0), lambda x: int(x > 0)),
    "relu_squared": Op(ops.relu_squared, lambda x: max(x, 0) ** 2, lambda x: 2 * max(x, 0)),
    "silu": Op(ops.silu, partial(swish, 1), partial(d_swish, 1), dx=8),
    "quick_gelu": Op(ops.quick_gelu, partial(swish, SLOPE), partial(d_swish, SLOPE), dx=8),
    "tanh": Op(ops.tanh, mpmath.tanh, lambda x: mpmath.sech(x) ** 2, dx=2),
    "sigmoid": Op(ops.sigmoid, logistic, lambda x: logistic(x) * logistic(-x), dx=1),
    "softcap": Op(
        partial(ops.softcap, cap=CAP),
        lambda x: CAP * mpmath.tanh(x / CAP),
        lambda x: mpmath.sech(x / CAP) ** 2,
        dx=3,
    ),
    "erf": Op(ops.erf, mpmath.erf, lambda x: 2 / mpmath.sqrt(mpmath.pi) * mpmath.exp(-x * x)),
    "gelu": Op(ops.gelu, gelu, d_gelu, y=8, dx=4),
    "gelu_tanh": Op(partial(ops.gelu, approximate="tanh"), gelu_tanh, d_gelu_tanh),
    "log_decay": Op(
        log_decay,
        lambda x: -mpmath.exp(RATE) * softplus(x),
        lambda x: -mpmath.exp(RATE) * logistic(x),
    ),
    "splade": Op(
        partial(splade, "log"),
        lambda x: mpmath.log1p(max(x, 0)),
        lambda x: 1 / (1 + x) if x > 0 else 0,
    ),
    "splade twice": Op(
        partial(splade, "log_log"),
        lambda x: mpmath.log1p(mpmath.log1p(max(x, 0))),
        lambda x: 1 / (1 + x) / (1 + mpmath.log1p(x)) if x > 0 else 0,
    ),
}
OPS |= {f"glu {name}": OPS[name]._replace(of_x=partial(glu, name)) for name in ACTIVATIONS}
# A probability near 1 is 1 minus what is near 0; its logarithm is a difference of numbers like x.
OPS |= {
    "clamped_swiglu": Op(
        clamped_swiglu,
        lambda x: swish(SLOPE, min(x, LIMIT)),
        lambda x: d_swish(SLOPE, x) if x < LIMIT else 0,
        dx=8,
    ),
    "softmax": Op(
        partial(first_of_two, ops.softmax),
        logistic,
        lambda x: logistic(x) * logistic(-x),
        dx=2,
    ),
    "log_softmax": Op(
        partial(first_of_two, ops.log_softmax),
        lambda x: -softplus(-x),
        lambda x: logistic(-x),
        y=80,
        dx=80,
    ),
}


def sweep(dtype: str) -> Any:
    """Numbers of both signs from 1e-7 to 80, so many that every kernel takes them."""
    sizes = np.exp(np.linspace(np.log(1e-7), np.log(80), N))
    return np.tile(np.concatenate([-sizes, sizes]).astype(dtype), 90)


def run(op: Op, x: Any) -> tuple[Any, ...]:
    y, cache = op.of_x(x)
    dx = cache.backward(y * 0 + 1)
    return tuple(flat(each) for each in (y, dx[0] if isinstance(dx, tuple) else dx))


def flat(x: Any) -> Any:
    return array_namespace(x).reshape(x, (-1,))


def compiled(op: Op, x: Any) -> tuple[Any, ...]:
    result: tuple[Any, ...] = xf.compile(partial(run, op))(x)
    return result


WAYS = [
    pytest.param("reference", run, reference_only, id="reference"),
    pytest.param("numpy", run, nullcontext, id="numpy"),
    pytest.param("numba", compiled, nullcontext, id="compiled"),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("kernels", "runs", "context"), WAYS)
@pytest.mark.parametrize("name", OPS)
def test_over_the_range(name: str, kernels: str, runs: Any, context: Any, dtype: str) -> None:
    if kernels == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
    op, x = OPS[name], sweep(dtype)
    eps, tiny = (float(number) for number in (np.finfo(dtype).eps, np.finfo(dtype).tiny))
    with context(), xf.kernels("numba") if kernels == "numba" else nullcontext():
        results = runs(op, x)
    with mpmath.workdps(50):
        for result, exact, allowed in zip(results, op[1:3], op[3:], strict=True):
            assert result.dtype == dtype
            for i in range(2 * N):  # the rest repeats these
                number = mpmath.mpf(float(x[i]))
                want = exact(number)
                moved = max(abs(exact(number * (1 + s * eps)) - want) for s in (-1, 1))
                limit = ROUNDINGS * (moved + eps * abs(want)) + allowed * eps + TINY * tiny
                assert abs(float(result[i]) - want) <= limit, (x[i], result[i], want)


def test_every_function_of_one_number_is_here() -> None:
    """All that feed-forward networks can call, with and without a gate."""
    assert {*ACTIVATIONS, *(f"glu {name}" for name in ACTIVATIONS), GATED} <= set(OPS)


def test_gated_delta_rule_keeps_slow_steps_after_fast_ones() -> None:
    """The decay of a step is not a difference of sums over the chunk, which fast steps round."""
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(3, 1, 1, 64, 8)).astype(np.float32)
    log_decay = np.full((1, 1, 64), -1e-3, np.float32)
    log_decay[..., :40] = -300
    beta = np.full((1, 1, 64), 0.5, np.float32)
    args = (q, k / 3, v, log_decay, beta)
    (y, _), _ = ops.gated_delta_rule(*args)
    (want, _), _ = ops.gated_delta_rule(*(a.astype(np.float64) for a in args), chunk_len=1)
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-6 * abs(want).max())
