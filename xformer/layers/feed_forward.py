"""The position-wise feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from xformer import ops
from xformer.layers.linear import LinearParams
from xformer.typing import Array

ACTIVATIONS: dict[str, Callable[[Array], tuple[Array, Any]]] = {
    "relu": ops.relu,
    "gelu": ops.gelu,
    "gelu_tanh": partial(ops.gelu, approximate="tanh"),
    "silu": ops.silu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
}


class FeedForwardParams(NamedTuple):
    """Two linear maps, to the hidden width and back."""

    up: LinearParams  # (D, F)
    down: LinearParams  # (F, D)


def feed_forward(
    x: Array, params: FeedForwardParams, *, activation: str = "relu"
) -> tuple[Array, FeedForwardCache]:
    """y = act(x w_up + b_up) w_down + b_down (arXiv:1706.03762, eq. 2).

    x, y: (..., D). activation: a name in `ACTIVATIONS`, ValueError for another one.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"feed_forward: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    hidden, up = ops.linear(x, *params.up)  # (..., F)
    hidden, act = ACTIVATIONS[activation](hidden)
    y, down = ops.linear(hidden, *params.down)
    return y, FeedForwardCache(up, act, down)


class FeedForwardCache(NamedTuple):
    """What `feed_forward` keeps for its backward."""

    up: Any
    act: Any
    down: Any

    def backward(self, dy: Array) -> tuple[Array, FeedForwardParams]:
        """Gradients of x and params."""
        dhidden, *ddown = self.down.backward(dy)
        dhidden = self.act.backward(dhidden)
        dx, *dup = self.up.backward(dhidden)
        return dx, FeedForwardParams(LinearParams(*dup), LinearParams(*ddown))
