"""Training steps as calls of `Backend.compiled`: all of them arrays in, arrays out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from array_api_compat import array_namespace

from xformer import ops, optim, tree
from xformer.backends import Backend
from xformer.optim import Optimiser
from xformer.optim.accumulate import shares, weighted
from xformer.training.batch import Batch
from xformer.training.config import TrainConfig
from xformer.training.loss import ArrayLoss, Loss
from xformer.training.state import State
from xformer.typing import Array

Reduce = Callable[[Array], Array]  # as of `optim.reduced`


def why_not_compiled(loss: Loss, config: TrainConfig, place: Backend) -> str | None:
    """Why steps are made call by call; None where they can be compiled."""
    if config.precision == "float16":
        return "how float16's loss is scaled follows from the gradients of the step"
    if not isinstance(loss, ArrayLoss):
        return "the loss is no loss_of(model), whose work on the host is known"
    if place.compiled(lambda: None, ()) is None:
        return f"backend {place.name} has no such thing"
    return None


class CompiledSteps:
    """What `train` calls for its compiled steps.

    Parameters, the optimiser's arrays and the moving average are donated; batches, their shares and
    numbers, and the learning rate are further arguments.
    """

    def __init__(
        self,
        loss: Any,  # an ArrayLoss
        config: TrainConfig,
        place: Backend,
        optimiser: Optimiser,
        reduce: Reduce | None,
    ) -> None:
        self.loss, self.config, self.place, self.optimiser = loss, config, place, optimiser
        self.reduce = reduce
        self._call: Any = place.compiled(self._step, (0, 1, 2), lends=True)
        self._counters: list[str] = []  # leaves of the optimiser's state that are numbers

    def __call__(
        self, state: State, batches: Sequence[Batch], lr: float
    ) -> tuple[tuple[Any, Any, Any], tuple[float, float], Any]:
        """Trained parameters, optimiser's state and average after a step; loss and norm; gradients.

        ValueError for a batch without targets, or with ids that the model has not.
        """
        given = self._arguments(state, batches, lr)
        trained, own, average, numbers, grads = self._call(*given)
        found, size, *counts = self.place.to_numpy(numbers).tolist()
        counted = dict(zip(self._counters, map(int, counts), strict=True))
        own = tree.unflatten(state.optimiser, own | counted)
        return (trained, own, average), (found, size), grads

    def recorded(self, state: State, batches: Sequence[Batch], lr: float) -> Any:
        """The program of a step, where the library has one, and its inputs."""
        return self._call.recorded(*self._arguments(state, batches, lr))

    def _arguments(self, state: State, batches: Sequence[Batch], lr: float) -> tuple[Any, ...]:
        """What the compiled function is called with."""
        inputs = {
            "batches": [self.loss.inputs(batch) for batch in batches],
            "shares": shares(batches),
            "numbers": [state.batches + i + 1 for i in range(len(batches))],
            "lr": lr,
        }
        own = tree.flatten(state.optimiser)
        self._counters = [name for name, leaf in own.items() if isinstance(leaf, int)]
        return state.params, state.optimiser, state.ema, inputs

    def _step(self, params: Any, own: Any, average: Any, inputs: Any) -> Any:
        """Forward, backward, clipping, optimiser and average: a function of arrays."""
        config = self.config
        weights = self.place.cast_params(params, config.precision)

        def one(weights: Any, i: int) -> tuple[Array, Any]:
            key = ops.RandomKey(config.seed, step=inputs["numbers"][i])
            return self.loss.of(weights, inputs["batches"][i], key)

        value, grads = weighted(one, weights, inputs["shares"])
        if self.reduce is not None:
            grads = optim.reduced(grads, self.reduce)
        clip = math.inf if config.clip is None else config.clip
        clipped, norm = optim.clip_by_global_norm(grads, max_norm=clip, donate=True)
        options = {"lr": inputs["lr"], "donate": True}
        trained, own = self.optimiser.step(tree.trained(params), clipped, own, **options)
        if config.ema is not None:
            average = optim.ema(average, trained, decay=config.ema, donate=True)
        leaves = tree.flatten(own)
        xp = array_namespace(value)
        counts = [leaves.pop(name) for name in self._counters]
        numbers = xp.stack([xp.astype(x, xp.float64) for x in (value, norm, *counts)])
        return trained, leaves, average, numbers, grads
