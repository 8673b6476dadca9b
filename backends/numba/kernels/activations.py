"""The activations: one kernel for all; a code chooses the formula, a number is its parameter c.

Each loop reads an element once and computes the whole formula. silu and quick_gelu are
x sigmoid(c x); tanh and softcap are c tanh(x / c). The other formulas ignore c.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.jit import LOG2_E, elementwise, exp2, inlined
from xformer.backends.numba.kernels.layout import dense, record, recorded
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.native import LINE
from xformer.backends.numpy import gelu as numpys
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import Overridable
from xformer.dispatch.checks import require_cap, require_gradient
from xformer.ops.gelu import CUBIC, SCALE
from xformer.ops.gelu import FAR as GELU_FAR
from xformer.ops.quick_gelu import SLOPE
from xformer.ops.silu import FAR

RELU, RELU_SQUARED, SIGMOID, SWISH, TANH, GELU, GELU_TANH = range(7)
FROM_OUTPUT = (RELU, SIGMOID, TANH)  # the derivative is a function of y alone
FORMULAS = {  # (code, c)
    "relu": (RELU, 1.0),
    "relu_squared": (RELU_SQUARED, 1.0),
    "sigmoid": (SIGMOID, 1.0),
    "silu": (SWISH, 1.0),
    "quick_gelu": (SWISH, SLOPE),
    "tanh": (TANH, 1.0),
    "gelu": (GELU, 1.0),
    "gelu_tanh": (GELU_TANH, 1.0),
}
ZERO, ONE, TWO, FAR32 = np.float32(0), np.float32(1), np.float32(2), np.float32(FAR)
NEAR = np.float32(0.55)  # if |x| < NEAR, tanh(x) = x + x^3 P(x^2), of least relative error
P0, P1 = np.float32(-0.333333180451), np.float32(0.133326016675)
P2, P3, P4 = map(np.float32, (-0.053853856117, 0.021077751062, -0.006282463203))
T0, T1 = map(np.float32, numpys.TANH)
E0, E1, E2, E3, E4, E5, E6 = map(np.float32, numpys.EXACT)
SLOPE0, SLOPE1 = np.float32(2 * SCALE), np.float32(6 * SCALE * CUBIC)
GELU_FAR32, DENSITY = np.float32(GELU_FAR), np.float32(1 / math.sqrt(2 * math.pi))
HALF = np.float32(0.5)


def _refuses(x: Array, *, approximate: str = "none") -> str | None:
    return None if approximate in ("none", "tanh") else "only approximate none and tanh"


@recorded(ops.gelu, _refuses)
def gelu(x: Array, *, approximate: str = "none") -> tuple[Array, NumbaActivationCache]:
    """y = x * Phi(x), or its approximation by tanh."""
    return activate("gelu", x, FORMULAS["gelu" if approximate == "none" else "gelu_tanh"])


@recorded(ops.softcap)
def softcap(x: Array, *, cap: float) -> tuple[Array, NumbaActivationCache]:
    """y = cap * tanh(x / cap)."""
    cap = require_cap("softcap", cap, "cap")
    return activate("softcap", x, (TANH, cap))


def _register(op: Overridable[..., Any]) -> None:
    """Register the kernel of an activation without options."""

    def run(x: Array) -> tuple[Array, NumbaActivationCache]:
        return activate(op.__name__, x, FORMULAS[op.__name__])

    run.__name__ = op.__name__
    recorded(op)(run)


for _op in (ops.quick_gelu, ops.relu, ops.relu_squared, ops.sigmoid, ops.silu, ops.tanh):
    _register(_op)


def activate(name: str, x: Array, formula: tuple[int, float]) -> tuple[Array, NumbaActivationCache]:
    """Record an activation of x; y has the memory layout of x.

    name: of the instruction. formula: (code, c).
    """
    x, (code, c) = dense(x), formula
    (y,) = record(forward, name, x, code=code, c=c)
    return y, NumbaActivationCache(y if code in FROM_OUTPUT else x, name, formula)


@short
class NumbaActivationCache(NamedTuple):
    """Saved by an activation for backward: y if the code is in `FROM_OUTPUT`, else x."""

    saved: Array
    name: str
    formula: tuple[int, float]

    def backward(self, dy: Array) -> Array:
        """dx = dy * y'(x)."""
        saved, name, (code, c) = self
        require_gradient(name, "dy", dy, saved)
        return record(backward, f"{name} backward", saved, dy, code=code, c=c)[0]


@declared("y (N) <- x (N)", unit=LINE)
def forward(y: Any, x: Any, code: int, c: float) -> None:
    """Compute y = f(x). code, c: of the formula f (`FORMULAS`)."""
    activate_block(code, c, x, y)


@declared("dx (N) <- saved (N), dy (N)", unit=LINE)
def backward(dx: Any, saved: Any, dy: Any, code: int, c: float) -> None:
    """Compute dx = dy f'(x). saved: y if the code is in `FROM_OUTPUT`, else x."""
    differentiate_block(code, c, saved, dy, dx)


@elementwise
def activate_block(code: int, number: float, x: Any, y: Any) -> None:
    """Write y = f(x).

    code: the formula f, such as `SWISH`   number: its parameter c   x, y: (n,)
    """
    c = np.float32(number)
    if code == RELU:
        for i in range(x.size):
            y[i] = max(x[i], ZERO)
    elif code == RELU_SQUARED:
        for i in range(x.size):
            v = max(x[i], ZERO)
            y[i] = v * v
    elif code == SIGMOID:
        for i in range(x.size):
            # The exponent is at most 0: exp2 stops at 2^127, and 1 / (1 + 2^127) would not be 0.
            power = exp2(-LOG2_E * abs(x[i]))
            y[i] = (ONE if x[i] >= ZERO else power) / (ONE + power)
    elif code == SWISH:
        for i in range(x.size):
            v = max(x[i], -FAR32)  # 0 at -inf
            y[i] = v / (ONE + exp2(-LOG2_E * c * min(v, FAR32)))
    elif code == TANH:
        for i in range(x.size):
            y[i] = c * _tanh(x[i] / c)
    elif code == GELU:
        _gelu(x, y)
    else:
        _gelu_tanh(x, y)


@elementwise
def differentiate_block(code: int, number: float, saved: Any, dy: Any, dx: Any) -> None:
    """Write dx = dy f'(x).

    code: the formula f, such as `SWISH`
    number: its parameter c, used only by `SWISH` (x sigmoid(c x)) and `TANH` (c tanh(x / c))
    saved: (n,), y if the code is in `FROM_OUTPUT`, else x   dy, dx: (n,)
    """
    c = np.float32(number)
    if code == RELU:
        for i in range(dy.size):
            dx[i] = dy[i] if saved[i] > ZERO else ZERO
    elif code == RELU_SQUARED:
        for i in range(dy.size):
            dx[i] = dy[i] * (TWO * max(saved[i], ZERO))
    elif code == SIGMOID:
        for i in range(dy.size):
            dx[i] = dy[i] * saved[i] * (ONE - saved[i])
    elif code == SWISH:
        for i in range(dy.size):
            v = c * min(max(saved[i], -FAR32), FAR32)
            s = ONE / (ONE + exp2(-LOG2_E * v))
            dx[i] = dy[i] * s * (ONE + v * (ONE - s))
    elif code == TANH:
        for i in range(dy.size):
            t = saved[i] / c
            dx[i] = dy[i] * (ONE - t * t)
    elif code == GELU:
        _gelu_gradient(saved, dy, dx)
    else:
        _gelu_tanh_gradient(saved, dy, dx)


@inlined
def _tanh(x: Any) -> Any:
    """Return tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|); a polynomial if |x| < `NEAR`.

    For small |x|, e is close to 1, and 1 - e would lose digits.
    """
    square = x * x
    p = P0 + square * (P1 + square * (P2 + square * (P3 + square * P4)))
    power = exp2(-TWO * LOG2_E * abs(x))
    far = (ONE - power) / (ONE + power)
    far = -far if x < ZERO else far
    return x + x * square * p if abs(x) < NEAR else far


@elementwise
def _gelu_tanh(x: Any, y: Any) -> None:
    """Write y = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). x, y: (n,)."""
    for i in range(x.size):
        v = max(x[i], -GELU_FAR32)
        clipped = min(v, GELU_FAR32)
        y[i] = v / (ONE + exp2(clipped * (T0 + T1 * clipped * clipped)))


@elementwise
def _gelu_tanh_gradient(x: Any, dy: Any, dx: Any) -> None:
    """Write dx = dy * Phi * (1 + (1 - Phi) x (2 u)'), Phi = sigmoid(2 u) with u of `_gelu_tanh`.

    All arrays are (n,).
    """
    for i in range(x.size):
        v = min(max(x[i], -GELU_FAR32), GELU_FAR32)
        square = v * v
        phi = ONE / (ONE + exp2(v * (T0 + T1 * square)))
        dx[i] = dy[i] * phi * (ONE + (ONE - phi) * v * (SLOPE0 + SLOPE1 * square))


@elementwise
def _gelu(x: Any, y: Any) -> None:
    """Write y = x * Phi(x), Phi approximated by the sigmoid of an odd polynomial. x, y: (n,)."""
    for i in range(x.size):
        v = max(x[i], -GELU_FAR32)
        clipped = min(v, GELU_FAR32)
        s = clipped * clipped
        p = E0 + s * (E1 + s * (E2 + s * (E3 + s * (E4 + s * (E5 + s * E6)))))
        y[i] = v / (ONE + exp2(clipped * p))


@elementwise
def _gelu_gradient(x: Any, dy: Any, dx: Any) -> None:
    """Write dx = dy * (Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)). All arrays are (n,)."""
    for i in range(x.size):
        v = min(max(x[i], -GELU_FAR32), GELU_FAR32)
        s = v * v
        p = E0 + s * (E1 + s * (E2 + s * (E3 + s * (E4 + s * (E5 + s * E6)))))
        phi = ONE / (ONE + exp2(v * p))
        dx[i] = dy[i] * (phi + v * DENSITY * exp2(-HALF * LOG2_E * s))
