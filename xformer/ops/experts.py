"""A mixture of experts: each row runs through the feed-forward networks chosen for it."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace

from xformer import renamed
from xformer.checks import require_axis, require_gradient, require_ids
from xformer.dispatch import overridable
from xformer.ops.activation import ACTIVATIONS, require_activation
from xformer.shapes import shapes
from xformer.showing import short
from xformer.typing import Array

Weights = tuple[Array, Array, Array]  # gate (D, F), up (D, F), down (F, D) of one expert


@overridable
@renamed.arguments(fixed="not trainable")
@shapes("x (N, D)  w_gate (E, D, F)  w_up (E, D, F)  w_down (E, F, D)  weights (N, C)  ids (N, C)")
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
    """y_n = sum_c weights_nc * (act(x_n w_gate_e) * (x_n w_up_e)) w_down_e, e = ids_nc.

    The experts of arXiv:2401.04088, eq. 3. This reference runs every row through every expert, so
    that no shape depends on a value.

    x: (N, D)   w_gate, w_up: (E, D, F)   w_down: (E, F, D)   weights: (N, C)   ids: (N, C)
    integers in [0, E)   y: (N, D)
    ids: should be distinct within a row, which is not checked. An expert chosen twice gets the sum
        of both weights.
    activation: a name in `activation.ACTIVATIONS`.
    trainable: False: the experts are not trained, and their gradients are None.

    ValueError for another shape, an id out of range and an unknown activation; TypeError for
    another dtype. Derivation: docs/derivations/experts.md
    """
    ids = require_choice(ids, w_gate, activation)
    xp = array_namespace(x)
    y, parts = xp.zeros_like(x), []
    for e in range(w_gate.shape[0]):
        w_e = w_gate[e, ...], w_up[e, ...], w_down[e, ...]
        share = xp.sum(xp.where(ids == e, weights, 0.0), axis=1)  # (N,)
        y_e, part = one_expert(_chosen_rows(x, ids, e), w_e, share, activation)
        y = y + y_e
        parts.append(part)
    return y, ExpertsCache(x, w_gate, w_up, w_down, ids, activation, trainable, tuple(parts))


@short
class ExpertsCache(NamedTuple):
    """Saved by `experts` for backward: the inputs, and the hidden units of each expert.

    The output of an expert is not saved: the gradients depend only on its inputs and hidden units.
    """

    x: Array  # (N, D)
    w_gate: Array  # (E, D, F)
    w_up: Array  # (E, D, F)
    w_down: Array  # (E, F, D)
    ids: Array  # (N, C)
    activation: str
    trainable: bool
    parts: tuple[ExpertCache, ...]  # of each expert, with 0 in rows that did not choose it

    def backward(self, dy: Array) -> tuple[Array | None, ...]:
        """dx, dw_gate, dw_up, dw_down (None unless trainable) and dweights.

        Each expert computes them from the rows of dy that chose it; dx is the sum over experts.
        """
        require_gradient("experts", "dy", dy, self.x)
        x, ids = self.x, self.ids
        xp = array_namespace(dy)
        dx, dws, dshares = xp.zeros_like(x), [], []
        for e, part in enumerate(self.parts):
            w_e = self.w_gate[e, ...], self.w_up[e, ...], self.w_down[e, ...]
            dy_e, x_e = _chosen_rows(dy, ids, e), _chosen_rows(x, ids, e)
            dx_e, dw_e, dshare = part.backward(dy_e, x_e, w_e, self.activation, self.trainable)
            dx = dx + dx_e
            dws.append(dw_e)
            dshares.append(dshare)
        dw_gate, dw_up, dw_down = (
            xp.stack(dw) if self.trainable else None for dw in zip(*dws, strict=True)
        )
        dweights = xp.take_along_axis(xp.stack(dshares, axis=1), ids, axis=1)  # (N, C)
        return dx, dw_gate, dw_up, dw_down, dweights

    def factors(self, dy: Array) -> list[tuple[tuple[Array, Array], ...]]:
        """For each expert, the pairs (x, dy) whose products x^T dy are dw_gate, dw_up, dw_down."""
        pairs: list[tuple[tuple[Array, Array], ...]] = []
        for e, part in enumerate(self.parts):
            dy_e, x_e = _chosen_rows(dy, self.ids, e), _chosen_rows(self.x, self.ids, e)
            dgate, dup, hidden, _ = part.factors(dy_e, self.w_down[e, ...], self.activation)
            pairs.append(((x_e, dgate), (x_e, dup), (hidden, dy_e)))
        return pairs


def one_expert(x: Array, ws: Weights, share: Array, activation: str) -> tuple[Array, ExpertCache]:
    """y = (share * act(x w_gate) * (x w_up)) w_down, for one expert.

    x: (N, D), the rows   ws: the three weights   share: (N,), the router's weight of each row
    """
    w_gate, w_up, w_down = ws
    gate, up = x @ w_gate, x @ w_up  # (N, F)
    act, _ = ACTIVATIONS[activation](gate)
    return (share[:, None] * act * up) @ w_down, ExpertCache(gate, up, share)


@short
class ExpertCache(NamedTuple):
    """Saved by one expert for backward; x and the weights are passed to it again."""

    gate: Array  # (N, F)
    up: Array  # (N, F)
    share: Array  # (N,)

    def backward(
        self, dy: Array, x: Array, ws: Weights, activation: str, trainable: bool
    ) -> tuple[Array, Weights, Array]:
        """Gradients of x, of the three weights (each None unless trainable), and of share."""
        w_gate, w_up, w_down = ws
        dgate, dup, hidden, dshare = self.factors(dy, w_down, activation)
        dx = dgate @ w_gate.T + dup @ w_up.T
        if not trainable:
            return dx, (None, None, None), dshare
        return dx, (x.T @ dgate, x.T @ dup, hidden.T @ dy), dshare

    def factors(self, dy: Array, w_down: Array, activation: str) -> tuple[Array, ...]:
        """dgate, dup, the hidden units times share, and dshare."""
        up, share = self.up, self.share[:, None]
        act, act_cache = ACTIVATIONS[activation](self.gate)  # recomputed
        hidden = act * up
        dshared = dy @ w_down.T  # (N, F)
        dshare = array_namespace(dy).sum(dshared * hidden, axis=1)
        dhidden = share * dshared
        return act_cache.backward(dhidden * up), dhidden * act, share * hidden, dshare


def require_choice(ids: Array, w_gate: Array, activation: str) -> Array:
    """`ids` in the dtype of indices.

    TypeError if ids are not integers; ValueError if one is out of range, or the activation unknown.
    """
    require_activation("experts", activation)
    require_axis("experts", w_gate, 0, "w_gate")
    return require_ids("experts", "ids", ids, w_gate.shape[0], w_gate)


def _chosen_rows(x: Array, ids: Array, e: int) -> Array:
    """x with zeros in rows that did not choose expert e, so that an infinity does not spread."""
    xp = array_namespace(x)
    return xp.where(xp.any(ids == e, axis=1)[:, None], x, 0.0)
