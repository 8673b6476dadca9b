"""`experts`: choices are sorted by expert, so that the rows of an expert are contiguous in matmuls.

A choice is an element of ids (N, C): row n chose expert ids[n, c]. There are M = N C choices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba.jit import elementwise, rowwise
from xformer.backends.numba.kernels import grouped
from xformer.backends.numba.kernels.activations import (
    FORMULAS,
    FROM_OUTPUT,
    activate_block,
    differentiate_block,
)
from xformer.backends.numba.kernels.gemm import Pair
from xformer.backends.numba.kernels.grouped import Order
from xformer.backends.numba.kernels.index_add import emit_sums
from xformer.backends.numba.kernels.layout import record, recorded, unrecordable
from xformer.backends.numba.matmul import matmul_unsupported
from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.copies import contiguous, reshape
from xformer.backends.numba.program.declared import declared
from xformer.backends.numba.program.namespace import take
from xformer.backends.numba.program.program import program_of
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
from xformer.ops.clamped_swiglu import LIMIT
from xformer.ops.experts import experts as op
from xformer.ops.experts import require_choice

CLAMPED = "clamped_swiglu"
BLOCK = 2048  # elements of a row at a time: seven blocks fit in a core's caches


def _refuses(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    weights: Array,
    *biases: Array | None,
    activation: str = "silu",
    **_: Any,
) -> str | None:
    if activation not in FORMULAS and activation != CLAMPED:
        return f"no activation {activation!r}"
    return unrecordable(x, weights) or matmul_unsupported()


@recorded(op, _refuses)
def experts(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    weights: Array,
    b_gate: Array | None = None,
    b_up: Array | None = None,
    b_down: Array | None = None,
    *,
    ids: Array,
    activation: str = "silu",
    trainable: bool = True,
) -> tuple[Array, NumbaExpertsCache]:
    """y_n = sum_c weights_nc * (act(x_n w_gate_e) * (x_n w_up_e)) w_down_e, e = ids_nc.

    Biases and the clamps of "clamped_swiglu" are functions of the array API on the sorted choices.
    """
    ids = require_choice(ids, w_gate, activation)
    order = grouped.emit_order(program_of(x, weights), ids, len(w_gate))
    rows, weights = grouped.emit_rows("experts rows", x, order), contiguous(weights)
    gate = grouped.emit_grouped("experts gate", [Pair(rows, w_gate)], order)
    up = grouped.emit_grouped("experts up", [Pair(rows, w_up)], order)
    biases = b_gate, b_up, b_down
    chosen: Any = None
    if any(b is not None for b in biases):
        chosen = take(reshape(ids, (-1,)), order.choices, axis=0)
    gate, up = _with_bias(gate, b_gate, chosen), _with_bias(up, b_up, chosen)
    hidden = _emit_hidden(*_inputs(gate, up, activation), weights, order)
    down = grouped.emit_grouped("experts down", [Pair(hidden, w_down)], order)
    if b_down is not None:
        share: Any = take(reshape(weights, (-1,)), order.choices, axis=0)
        down = down + share[:, None] * take(b_down, chosen, axis=0)
    y = grouped.emit_sums("experts sums", down, order, len(x))
    return y, NumbaExpertsCache(
        x, w_gate, w_up, w_down, weights, order, gate, up, activation, trainable, biases, chosen
    )


def _with_bias(x: Array, b: Any, chosen: Any) -> Array:
    """x (M, F) plus the bias of each choice's expert. b: (E, F), chosen: (M,)."""
    return x if b is None else x + take(b, chosen, axis=0)


def _inputs(gate: Array, up: Array, activation: str) -> tuple[Array, Array, str]:
    """Gate, up and the activation of the gated unit act(gate) * up."""
    if activation != CLAMPED:
        return gate, up, activation
    up = namespace.minimum(namespace.maximum(up, -LIMIT), LIMIT) + 1
    return namespace.minimum(gate, LIMIT), up, "quick_gelu"


@short
class NumbaExpertsCache(NamedTuple):
    """Saved by `experts` for backward, which gathers the rows of x again."""

    x: Array  # (N, D)
    w_gate: Array  # (E, D, F)
    w_up: Array  # (E, D, F)
    w_down: Array  # (E, F, D)
    weights: Array  # (N, C)
    order: Order
    gate: Array  # (M, F): x w_gate + b_gate of each choice, sorted by expert
    up: Array  # (M, F): x w_up + b_up of each choice, sorted by expert
    activation: str
    trainable: bool
    biases: tuple[Array | None, ...]  # b_gate, b_up, b_down
    chosen: Any  # (M,): the expert of each sorted choice; None without biases

    def backward(self, dy: Array) -> tuple[Array | None, ...]:
        """Return the gradients of x, of the experts (None unless trainable), and of `weights`.

        The gradients of biases are last.
        """
        require_gradient("experts", "dy", dy, self.x)
        order, w_gate, w_up, w_down = self.order, self.w_gate, self.w_up, self.w_down
        dy_rows = grouped.emit_rows("experts dy rows", dy, order)
        dhidden = grouped.emit_grouped("experts dhidden", [Pair(dy_rows, w_down.mT)], order)
        gate, up, activation = _inputs(self.gate, self.up, self.activation)
        unit = self._replace(gate=gate, up=up, activation=activation)
        dgate, dup, dweights, *hidden = _emit_backward(unit, dhidden)
        if self.activation == CLAMPED:
            dgate = namespace.where(self.gate > LIMIT, 0.0, dgate)
            dup = namespace.where(namespace.abs(self.up) > LIMIT, 0.0, dup)
        if (b_down := self.biases[2]) is not None:
            dshare = namespace.sum(dy_rows * take(b_down, self.chosen, axis=0), axis=1)
            dshare = take(dshare, order.positions, axis=0)
            dweights = dweights + reshape(dshare, dweights.shape)
        pairs = [Pair(dgate, w_gate.mT), Pair(dup, w_up.mT)]
        dx_rows = grouped.emit_grouped("experts dx rows", pairs, order)
        dx = grouped.emit_sums("experts dx", dx_rows, order, len(dy))
        if not self.trainable:
            return dx, None, None, None, dweights, None, None, None
        rows = grouped.emit_rows("experts rows", self.x, order)
        triples = (rows, w_gate, dgate), (rows, w_up, dup), (hidden[0], w_down, dy_rows)
        dws = (grouped.emit_gradient("experts dw", *x_w_dy, order) for x_w_dy in triples)
        return dx, *dws, dweights, *self._bias_gradients(dgate, dup, dy_rows)

    def _bias_gradients(self, dgate: Array, dup: Array, dy_rows: Array) -> list[Array | None]:
        """The sums over the choices of each expert; None for a bias that is absent."""
        dzs = [dgate, dup, dy_rows]
        if self.biases[2] is not None:
            share = take(reshape(self.weights, (-1,)), self.order.choices, axis=0)
            dzs[2] = share[:, None] * dy_rows
        return [
            None if b is None else emit_sums("experts db", b.shape, dz, self.chosen)
            for b, dz in zip(self.biases, dzs, strict=True)
        ]


def _emit_hidden(gate: Array, up: Array, activation: str, weights: Array, order: Order) -> Array:
    """Return hidden = weight * act(gate) * up of each choice, sorted by expert: (M, F)."""
    code, c = FORMULAS[activation]
    ins = gate, up, weights, order.choices
    return record(forward, "experts hidden", *ins, code=code, c=c)[0]


def _emit_backward(cache: NumbaExpertsCache, dhidden: Array) -> list[Array]:
    """Return dgate and dup (M, F), dweights (N, C), and hidden (M, F) if `cache.trainable`.

    hidden = weight * act(gate) * up is computed again; the gradient of w_down needs it.
    """
    gate, weights, activation = cache.gate, cache.weights, cache.activation
    code, c = FORMULAS[activation]
    ins = gate, cache.up, weights, cache.order.choices, dhidden
    without = None if cache.trainable else "hidden"
    return record(backward, "experts hidden backward", *ins, without=without, code=code, c=c)


@declared("hidden (M, F) <- gate (M, F), up (M, F), weights (W), choices (M) int64")
def forward(
    hidden: Any, gate: Any, up: Any, weights: Any, choices: Any, code: int, c: float
) -> None:
    """Compute rows of hidden = weight * act(gate) * up. code, c: of act (`activations.FORMULAS`).

    weights: of all W = N C choices. Values of choices are clamped to [0, W).
    """
    acts = np.empty(BLOCK, np.float32)
    for i in range(len(choices)):
        weight = weights[min(max(choices[i], 0), len(weights) - 1)]
        for first in range(0, gate.shape[1], BLOCK):
            at = slice(first, first + BLOCK)
            act = acts[: len(gate[i, at])]
            activate_block(code, c, gate[i, at], act)
            _multiply(weight, act, up[i, at], hidden[i, at])


@declared(
    "dgate (M, F), dup (M, F), dweights (W), hidden? (M, F) "
    "<- gate (M, F), up (M, F), weights (W), choices (M) int64, dhidden (M, F)"
)
def backward(
    dgate: Any,
    dup: Any,
    dweights: Any,
    hidden: Any,
    gate: Any,
    up: Any,
    weights: Any,
    choices: Any,
    dhidden: Any,
    code: int,
    c: float,
) -> None:
    """Compute rows of dgate, dup, dweights, and of hidden if it is an output. As `forward`."""
    acts, dacts = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for i in range(len(choices)):
        choice, total = min(max(choices[i], 0), len(weights) - 1), np.float32(0)
        weight = weights[choice]
        for first in range(0, gate.shape[1], BLOCK):
            at = slice(first, first + BLOCK)
            y, dact = acts[: len(gate[i, at])], dacts[: len(gate[i, at])]
            activate_block(code, c, gate[i, at], y)
            _multiply(weight, dhidden[i, at], up[i, at], dact)
            saved = y if code in FROM_OUTPUT else gate[i, at]
            differentiate_block(code, c, saved, dact, dgate[i, at])
            total += _sum(dhidden[i, at], y, up[i, at])
            _multiply(weight, dhidden[i, at], y, dup[i, at])
            if len(hidden):
                _multiply(weight, y, up[i, at], hidden[i, at])
        dweights[choice] = total


@elementwise
def _multiply(weight: Any, x: Any, y: Any, out: Any) -> None:
    """Write out = weight * x * y. weight: a number."""
    for j in range(out.size):
        out[j] = weight * x[j] * y[j]


@rowwise
def _sum(x: Any, y: Any, z: Any) -> Any:
    """Return the sum of x * y * z."""
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * y[j] * z[j]
    return total
