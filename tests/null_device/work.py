"""What the null device is given to do: training steps and texts, and what was seen of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
from null_device import device
from null_device.device import cupy

from xformer import backends, optim, tree
from xformer.initial import Shapes

PLACE = backends.get("cupy")


def parameters(model: Any) -> Any:
    """Those of a model, in float32, with the shapes of `init` and without values."""
    return tree.map(lambda p: cupy.empty(p.shape, np.float32), model.init_from(Shapes()))


def ids(size: int, batch: int, length: int) -> tuple[Any, Any]:
    """Tokens, and targets."""
    drawn = np.random.default_rng(0).integers(0, size, (batch, length + 1))
    return PLACE.asarray(drawn[:, :-1].copy()), PLACE.asarray(drawn[:, 1:].copy())


class Steps:
    """Training steps of a model: each call of `step` is one, as a loop of one's own makes it."""

    def __init__(self, model: Any, arrays: tuple[Any, ...], precision: str | None = None) -> None:
        self.model, self.arrays, self.precision = model, arrays, precision
        self.params = parameters(model)
        self.state = optim.adamw_init(self.params)

    def step(self) -> None:
        weights = PLACE.weights(self.params, self.precision)
        _, cache = self.model.loss(weights, *self.arrays)
        grads = cache.backward()
        self.params, self.state = optim.adamw(self.params, grads, self.state, lr=3e-4, donate=True)


def steady(step: Callable[[], Any], **options: Any) -> device.Seen:
    """What is called in a step once two have been made: kernels are compiled, the pool has grown.

    Python's collector of cycles is off meanwhile: when it runs depends on its version.
    """
    step()
    step()
    gc.collect()
    gc.disable()
    try:
        with device.counting(**options) as seen:
            step()
    finally:
        gc.enable()
    return seen
