"""`experts`: each choice of an expert is a row, sorted by expert, of products without gaps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.compiled import elementwise, rowwise
from xformer.backends.numba.kernels import grouped
from xformer.backends.numba.kernels.activations import FORMULAS, OF_Y, slopes, values
from xformer.backends.numba.kernels.gemm import Pair
from xformer.backends.numba.kernels.grouped import Order
from xformer.backends.numba.kernels.layout import program_of
from xformer.backends.numba.kernels.linear import unsupported as not_products
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import (
    Native,
    bits,
    float32s,
    native,
    numbers,
    operands,
    part,
    real,
    words,
)
from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.ops.experts import experts as op
from xformer.ops.experts import require_choice
from xformer.showing import short
from xformer.typing import Array

BLOCK = 2048  # elements of a row at once: seven arrays of them fit in a core's caches


def unsupported(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    weights: Array,
    *,
    ids: Array,
    activation: str = "silu",
    trainable: bool = True,
) -> str | None:
    """Why the kernel cannot run."""
    if activation not in FORMULAS:
        return f"no activation {activation!r}"
    if any(array.dtype != np.float32 for array in (w_gate, w_up, w_down)):
        return "only float32"
    return not_products(x, weights)


@kernel(op, "numba.kernels", unsupported=unsupported)
def experts(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    weights: Array,
    *,
    ids: Array,
    activation: str = "silu",
    trainable: bool = True,
) -> tuple[Array, ExpertsCache]:
    """y_n = sum_c weights_nc * (act(x_n w_gate_e) * (x_n w_up_e)) w_down_e, e = ids_nc."""
    ids = require_choice(ids, w_gate, activation)
    order = grouped.emit_order(program_of(x, weights), ids, len(w_gate))
    rows, weights = grouped.emit_rows("experts rows", x, order), contiguous(weights)
    gate = grouped.emit_grouped("experts gate", [Pair(rows, w_gate)], order)
    up = grouped.emit_grouped("experts up", [Pair(rows, w_up)], order)
    hidden = _emit_hidden(gate, up, weights, order, activation)
    each = grouped.emit_grouped("experts down", [Pair(hidden, w_down)], order)
    y = grouped.emit_sums("experts sums", each, order, len(x))
    return y, ExpertsCache(x, w_gate, w_up, w_down, weights, order, gate, up, activation, trainable)


@short
class ExpertsCache(NamedTuple):
    """Saved by `experts` for backward; rows of x are gathered again."""

    x: Array  # (N, D)
    w_gate: Array  # (E, D, F)
    w_up: Array  # (E, D, F)
    w_down: Array  # (E, F, D)
    weights: Array  # (N, C)
    order: Order
    gate: Array  # (M, F), M = N C
    up: Array  # (M, F)
    activation: str
    trainable: bool

    def backward(self, dy: Array) -> tuple[Array | None, ...]:
        """Gradients of x, of the experts (None unless trainable), and of the choices' weights."""
        require_gradient("experts", "dy", dy, self.x)
        order, w_gate, w_up, w_down = self.order, self.w_gate, self.w_up, self.w_down
        dy_rows = grouped.emit_rows("experts dy rows", dy, order)
        dshared = grouped.emit_grouped("experts dhidden", [Pair(dy_rows, w_down.mT)], order)
        dgate, dup, dweights, *shared = _emit_backward(self, dshared)
        pairs = [Pair(dgate, w_gate.mT), Pair(dup, w_up.mT)]
        each = grouped.emit_grouped("experts dx rows", pairs, order)
        dx = grouped.emit_sums("experts dx", each, order, len(dy))
        if not self.trainable:
            return dx, None, None, None, dweights
        rows = grouped.emit_rows("experts rows", self.x, order)
        triples = (rows, w_gate, dgate), (rows, w_up, dup), (shared[0], w_down, dy_rows)
        dws = (grouped.emit_gradient("experts dw", *own, order) for own in triples)
        return dx, *dws, dweights


def _emit_hidden(gate: Array, up: Array, weights: Array, order: Order, activation: str) -> Array:
    """(M, F): weight * act(gate) * up of each choice."""
    program, (code, number) = order.rows.program, FORMULAS[activation]
    hidden = program.fresh(gate.shape, np.float32)

    def run(hidden: Any, gate: Any, up: Any, weights: Any, choices: Any) -> None:
        share = weights.reshape(-1)[choices][:, None]
        hidden[...] = share * ops.glu.reference(gate, up, activation=activation)[0]

    own = Native(forward, (*gate.shape, code, bits(number)), program.pieces(gate.size))
    program.emit("experts hidden", run, [hidden], [gate, up, weights, order.choices], own)
    return hidden


def _emit_backward(cache: ExpertsCache, dshared: Array) -> list[Array]:
    """dgate and dup (M, F), dweights (N, C); if trainable, weight * act(gate) * up again."""
    gate, weights, activation = cache.gate, cache.weights, cache.activation
    program, (code, number) = cache.order.rows.program, FORMULAS[activation]
    shapes = [gate.shape, gate.shape, weights.shape, *([gate.shape] if cache.trainable else [])]
    outs = [program.fresh(shape, np.float32) for shape in shapes]

    def run(dgate: Any, dup: Any, dweights: Any, *others: Any) -> None:
        *shared, gate, up, weights, choices, dshared = others
        share = weights.reshape(-1)[choices][:, None]
        y, glu = ops.glu.reference(gate, up, activation=activation)
        dgate[...], dup[...] = glu.backward(share * dshared)
        dweights.reshape(-1)[choices] = np.sum(dshared * y, axis=1)
        for own in shared:
            own[...] = share * y

    ins = [gate, cache.up, weights, cache.order.choices, dshared]
    own = Native(backward, (*gate.shape, code, bits(number)), program.pieces(gate.size))
    program.emit("experts hidden backward", run, outs, ins, own)
    return outs


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """hidden; gate, up, weights, choices, M, F, code, number."""
    a = words(args, 9)
    n, width, number, act = a[5], a[6], real(a[8]), np.empty(BLOCK, np.float32)
    weights, choices = float32s(a[3], (n,)), words(a[4], n)
    start, stop = part(n, piece, pieces, 1)
    for i in range(start, stop):
        weight = weights[min(max(choices[i], 0), n - 1)]
        for first in range(0, width, BLOCK):
            size, at = (min(BLOCK, width - first),), 4 * (i * width + first)
            gate, up = float32s(a[1] + at, size), float32s(a[2] + at, size)
            values(a[7], number, gate, act[: size[0]])
            _share(weight, act[: size[0]], up, float32s(a[0] + at, size))


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """dgate, dup, dweights, or hidden too; gate, up, weights, choices, dshared; as `forward`."""
    n_outs, a = operands(args) - 5, numbers(args, 4)
    at, n, width, code, number = words(args, n_outs + 5), a[0], a[1], a[2], real(a[3])
    weights, choices = float32s(at[n_outs + 2], (n,)), words(at[n_outs + 3], n)
    act, dact = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    start, stop = part(n, piece, pieces, 1)
    for i in range(start, stop):
        choice, total = min(max(choices[i], 0), n - 1), np.float32(0)
        weight = weights[choice]
        for first in range(0, width, BLOCK):
            size, far = (min(BLOCK, width - first),), 4 * (i * width + first)
            gate, up = float32s(at[n_outs] + far, size), float32s(at[n_outs + 1] + far, size)
            dy, y, slope = float32s(at[n_outs + 4] + far, size), act[: size[0]], dact[: size[0]]
            dup = float32s(at[1] + far, size)
            values(code, number, gate, y)
            _share(weight, dy, up, slope)
            slopes(code, number, y if code in OF_Y else gate, slope, float32s(at[0] + far, size))
            total += _sum(dy, y, up)
            _share(weight, dy, y, dup)
            if n_outs == 4:
                _share(weight, y, up, float32s(at[3] + far, size))
        float32s(at[2], (n,))[choice] = total


@elementwise
def _share(weight: Any, x: Any, y: Any, out: Any) -> None:
    """out = weight x y."""
    for j in range(out.size):
        out[j] = weight * x[j] * y[j]


@rowwise
def _sum(x: Any, y: Any, z: Any) -> Any:
    """The sum of x y z."""
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * y[j] * z[j]
    return total
