"""One kernel for all activations; a code chooses the formula, and a number is its parameter c.

Each loop reads an element once and computes the whole formula. silu and quick_gelu are
x sigmoid(c x); tanh and softcap are c tanh(x / c). The other formulas ignore c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.compiled import LOG2_E, elementwise, exp2, inlined
from xformer.backends.numba.kernels.gelu_forms import (
    exact_form,
    exact_gradient,
    tanh_form,
    tanh_gradient,
)
from xformer.backends.numba.kernels.layout import (
    dense,
    fresh_in,
    in_order,
    order_of,
    program_of,
    unrecordable,
)
from xformer.backends.numba.program.native import (
    LINE,
    Native,
    bits,
    float32s,
    native,
    part,
    real,
    words,
)
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
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
Reference = Callable[[Any], tuple[Any, Any]]


def unsupported(x: Array) -> str | None:
    """Return why this kernel of an activation cannot run, or None if it can.

    It needs x in float32 that is no constant of the program.
    """
    return unrecordable(x)


def activate(
    name: str, x: Array, reference: Reference, formula: tuple[int, float]
) -> tuple[Array, NumbaActivationCache]:
    """Record an activation of x; y has the memory layout of x.

    name: of the instruction. reference: the activation on NumPy arrays. formula: (code, c).
    """
    program, x = program_of(x), dense(x)
    y = fresh_in(program, order_of(x), x.shape, x.dtype)

    def run(y: Any, x: Any) -> None:
        np.copyto(y, reference(x)[0])

    code, number = formula
    compiled = Native(forward, (x.size, code, bits(number)), program.pieces(x.size))
    program.emit(name, run, [y], [x], compiled)
    return y, NumbaActivationCache(y if code in FROM_OUTPUT else x, name, reference, formula)


@short
class NumbaActivationCache(NamedTuple):
    """Saved by an activation for backward: y if the code is in `FROM_OUTPUT`, else x."""

    saved: Array
    name: str
    reference: Reference
    formula: tuple[int, float]

    def backward(self, dy: Array) -> Array:
        """dx = dy * y'(x)."""
        saved, name, reference, (code, number) = self
        require_gradient(name, "dy", dy, saved)
        program, order = program_of(saved, dy), order_of(saved)
        dx = fresh_in(program, order, saved.shape, saved.dtype)

        def run(dx: Any, saved: Any, dy: Any) -> None:
            cache = reference(saved)[1]
            np.copyto(dx, cache._replace(**{cache._fields[0]: saved}).backward(dy))

        compiled = Native(backward, (dx.size, code, bits(number)), program.pieces(dx.size))
        program.emit(f"{name} backward", run, [dx], [saved, in_order(dy, order)], compiled)
        return dx


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute a piece of y = f(x). A `Kernel` (see `native`).

    outputs: y; inputs: x. integers: the number of elements, the code of the formula f (`FORMULAS`),
    the bits of its parameter c.
    """
    a = words(args, 5)
    start, stop = part(a[2], piece, pieces, LINE)
    n = (stop - start,)
    activate_block(a[3], real(a[4]), float32s(a[1] + 4 * start, n), float32s(a[0] + 4 * start, n))


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute a piece of dx = dy f'(x). A `Kernel` (see `native`).

    outputs: dx; inputs: saved (y if the code is in `FROM_OUTPUT`, else x), dy. integers: the number
    of elements, the code of the formula f (`FORMULAS`), the bits of its parameter c.
    """
    a = words(args, 6)
    start, stop = part(a[3], piece, pieces, LINE)
    n = (stop - start,)
    saved, dy = float32s(a[1] + 4 * start, n), float32s(a[2] + 4 * start, n)
    differentiate_block(a[4], real(a[5]), saved, dy, float32s(a[0] + 4 * start, n))


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
        exact_form(x, y)
    else:
        tanh_form(x, y)


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
        exact_gradient(saved, dy, dx)
    else:
        tanh_gradient(saved, dy, dx)


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
