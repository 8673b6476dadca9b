"""A mixture of experts: each row runs through the feed-forward networks chosen for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_axis, require_gradient, require_ids
from xformer.dispatch.shapes import shapes
from xformer.ops.activation import gated_unit

# Of one expert: gate (D, F), up (D, F), down (F, D), and their biases (F), (F), (D) or None.
Weights = tuple[Any, ...]


@overridable
@shapes(
    "x (N, D)  w_gate (E, D, F)  w_up (E, D, F)  w_down (E, F, D)  weights (N, C)  "
    "b_gate (E, F)  b_up (E, F)  b_down (E, D)  ids (N, C)"
)
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
) -> tuple[Array, ExpertsCache]:
    """y_n = sum_c weights_nc * (act(x_n w_gate_e) * (x_n w_up_e)) w_down_e, e = ids_nc.

    The bias of the expert, if there is one, is added to each of the three products. They are the
    experts of arXiv:2401.04088, eq. 3, and with biases of gpt-oss. This reference runs every row
    through every expert, so that no shape depends on a value.

    x: (N, D)   w_gate, w_up: (E, D, F)   w_down: (E, F, D)   weights: (N, C)   b_gate, b_up:
    (E, F)   b_down: (E, D)   ids: (N, C) integers in [0, E)   y: (N, D)
    ids: should be distinct within a row, which is not checked. An expert chosen twice gets the sum
        of both weights.
    activation: a name in `activation.ACTIVATIONS`, or "clamped_swiglu" for `ops.clamped_swiglu`
        in place of act(gate) * up.
    trainable: False: the experts are not trained, and their gradients are None.

    ValueError for another shape, an id out of range and an unknown activation; TypeError for
    another dtype. Derivation: docs/derivations/experts.md
    """
    ids = require_choice(ids, w_gate, activation)
    xp = array_namespace(x)
    ws = w_gate, w_up, w_down, b_gate, b_up, b_down
    y, parts = xp.zeros_like(x), []
    for e in range(w_gate.shape[0]):
        share = xp.sum(xp.where(ids == e, weights, 0.0), axis=1)  # (N,)
        y_e, part = one_expert(_chosen_rows(x, ids, e), of_expert(ws, e), share, activation)
        y = y + y_e
        parts.append(part)
    return y, ExpertsCache(x, ws, ids, activation, trainable, tuple(parts))


@short
class ExpertsCache(NamedTuple):
    """Saved by `experts` for backward: the inputs, and the hidden units of each expert.

    The output of an expert is not saved: the gradients depend only on its inputs and hidden units.
    """

    x: Array  # (N, D)
    ws: tuple[Array | None, ...]  # w_gate, w_up, w_down, b_gate, b_up, b_down
    ids: Array  # (N, C)
    activation: str
    trainable: bool
    parts: tuple[ExpertCache, ...]  # of each expert, with 0 in rows that did not choose it

    def backward(self, dy: Array) -> tuple[Array | None, ...]:
        """dx, dw_gate, dw_up, dw_down, dweights, db_gate, db_up and db_down.

        The gradients of weights and biases are None unless trainable.

        Each expert computes them from the rows of dy that chose it; dx is the sum over experts.
        """
        require_gradient("experts", "dy", dy, self.x)
        x, ids = self.x, self.ids
        xp = array_namespace(dy)
        dx, dws, dshares = xp.zeros_like(x), [], []
        for e, part in enumerate(self.parts):
            dy_e, x_e = _chosen_rows(dy, ids, e), _chosen_rows(x, ids, e)
            w_e = of_expert(self.ws, e)
            dx_e, dw_e, dshare = part.backward(dy_e, x_e, w_e, self.activation, self.trainable)
            dx = dx + dx_e
            dws.append(dw_e)
            dshares.append(dshare)
        dweights = xp.take_along_axis(xp.stack(dshares, axis=1), ids, axis=1)  # (N, C)
        stacked = [None if dw[0] is None else xp.stack(dw) for dw in zip(*dws, strict=True)]
        return dx, *stacked[:3], dweights, *stacked[3:]

    def factors(self, dy: Array) -> list[tuple[tuple[Array, Array], ...]]:
        """For each expert, the pairs (x, dy) whose products x^T dy are dw_gate, dw_up, dw_down.

        The gradient of a bias is the sum of dy over rows. For b_down, dy is multiplied by the share
        of the expert.
        """
        pairs: list[tuple[tuple[Array, Array], ...]] = []
        for e, part in enumerate(self.parts):
            dy_e, x_e = _chosen_rows(dy, self.ids, e), _chosen_rows(self.x, self.ids, e)
            dgate, dup, hidden, _ = part.factors(dy_e, of_expert(self.ws, e), self.activation)
            pairs.append(((x_e, dgate), (x_e, dup), (hidden, dy_e)))
        return pairs


def of_expert(ws: tuple[Array | None, ...], e: int) -> Weights:
    """The weights and biases of expert e. ws: of all experts."""
    return tuple(None if w is None else w[e, ...] for w in ws)


def one_expert(x: Array, ws: Weights, share: Array, activation: str) -> tuple[Array, ExpertCache]:
    """y = share * ((act(x w_gate + b_gate) * (x w_up + b_up)) w_down + b_down), for one expert.

    x: (N, D), the rows   share: (N,), the router's weight of each row
    """
    w_gate, w_up, w_down, b_gate, b_up, b_down = ws
    gate, up = _linear(x, w_gate, b_gate), _linear(x, w_up, b_up)  # (N, F)
    hidden, _ = gated_unit("experts", activation)(gate, up)
    y = (share[:, None] * hidden) @ w_down
    if b_down is not None:
        y = y + share[:, None] * b_down
    return y, ExpertCache(gate, up, share)


def _linear(x: Array, w: Any, b: Array | None) -> Array:
    y: Array = x @ w
    return y if b is None else y + b


@short
class ExpertCache(NamedTuple):
    """Saved by one expert for backward; x and the weights are passed to it again."""

    gate: Array  # (N, F)
    up: Array  # (N, F)
    share: Array  # (N,)

    def backward(
        self, dy: Array, x: Array, ws: Weights, activation: str, trainable: bool
    ) -> tuple[Array, Weights, Array]:
        """Gradients of x, of weights and biases (each None unless trainable), and of share."""
        w_gate, w_up, _, *biases = ws
        dgate, dup, hidden, dshare = self.factors(dy, ws, activation)
        dx = dgate @ w_gate.T + dup @ w_up.T
        if not trainable:
            return dx, (None,) * len(ws), dshare
        sums = dgate, dup, self.share[:, None] * dy
        dbs = (_sum(dz) if b is not None else None for b, dz in zip(biases, sums, strict=True))
        return dx, (x.T @ dgate, x.T @ dup, hidden.T @ dy, *dbs), dshare

    def factors(self, dy: Array, ws: Weights, activation: str) -> tuple[Array, ...]:
        """dgate, dup, the hidden units times share, and dshare."""
        _, _, w_down, _, _, b_down = ws
        hidden, unit = gated_unit("experts", activation)(self.gate, self.up)  # recomputed
        dshared = dy @ w_down.T  # (N, F)
        xp = array_namespace(dy)
        dshare = xp.sum(dshared * hidden, axis=1)
        if b_down is not None:
            dshare = dshare + xp.sum(dy * b_down, axis=1)
        share = self.share[:, None]
        return *unit.backward(share * dshared), share * hidden, dshare


def _sum(dy: Array) -> Array:
    """The sum over rows."""
    return array_namespace(dy).sum(dy, axis=0)


def require_choice(ids: Array, w_gate: Array, activation: str) -> Array:
    """`ids` in the dtype of indices.

    TypeError if ids are not integers; ValueError if one is out of range, or the activation unknown.
    """
    gated_unit("experts", activation)
    require_axis("experts", w_gate, 0, "w_gate")
    return require_ids("experts", "ids", ids, w_gate.shape[0], w_gate)


def _chosen_rows(x: Array, ids: Array, e: int) -> Array:
    """x with zeros in rows that did not choose expert e, so that an infinity does not spread."""
    xp = array_namespace(x)
    return xp.where(xp.any(ids == e, axis=1)[:, None], x, 0.0)
