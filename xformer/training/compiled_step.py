"""Compiled training steps, by `Backend.compiled`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xformer import ops, optim
from xformer.backends import Backend
from xformer.base import tree
from xformer.base.keys import Reads, Unkeyed
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.compiling import KEPT
from xformer.distributed.world import World
from xformer.optim import Optimiser
from xformer.optim.accumulate import shares, weighted
from xformer.training.batch import Batch
from xformer.training.config import TrainConfig
from xformer.training.loss import ArrayLoss, Loss, SegmentLoss
from xformer.training.state import State

Reduce = Callable[[Array], Array]  # of `optim.reduced`


def why_not_compiled(loss: Loss, config: TrainConfig, backend: Backend, world: World) -> str | None:
    """The reason why steps cannot be compiled; None if they can."""
    if world.size > 1:
        return f"the {world.size} processes add their gradients within the step"
    if config.precision == "float16":
        return "the loss scale of float16 depends on the gradients of the step"
    if isinstance(loss, SegmentLoss):
        return "the segment memory grows in the first steps"
    if not isinstance(loss, ArrayLoss):
        return "the loss must be a loss_of(model), which separates its work on the host"
    if backend.compiled(lambda: None, ()) is None:
        return f"backend {backend.name} compiles nothing"
    return None


@dataclass(eq=False)
class CompiledSteps:
    """The compiled step of `train`.

    Parameters, the optimiser's arrays and the moving average are donated. Batches, their weights
    and numbers, and the learning rate are further arguments.
    """

    loss: Any  # an ArrayLoss
    config: TrainConfig
    backend: Backend
    optimiser: Optimiser
    reduce: Reduce | None

    def __post_init__(self) -> None:
        self._reads = Reads(self.optimiser.step, host_values=True)
        self._calls: dict[Any, Any] = {}  # by the key of what the optimiser reads
        self._numbers: list[str] = []  # leaves of the optimiser's state that are Python numbers

    def __call__(
        self, state: State, batches: Sequence[Batch], lr: float
    ) -> tuple[tuple[Any, Any, Any], tuple[float, float], Any]:
        """Trained parameters, optimiser state and average after a step; loss and norm; gradients.

        ValueError for a batch without targets, or with ids outside the vocabulary.
        """
        arguments = self._arguments(state, batches, lr)
        trained, optimiser, average, numbers, grads, counters = self._call()(*arguments)
        loss, norm, *counts = self.backend.to_numpy(numbers).tolist()
        if counts:
            leaves, old = tree.flatten(optimiser), tree.flatten(state.optimiser)
            for name, count in zip(counters, counts, strict=True):
                leaves[name] = type(old[name])(count)
            optimiser = tree.unflatten(optimiser, leaves)
        return (trained, optimiser, average), (loss, norm), grads

    def recorded(self, state: State, batches: Sequence[Batch], lr: float) -> Any:
        """The program of a step and its inputs, if the library has programs."""
        return self._call().recorded(*self._arguments(state, batches, lr))

    def _call(self) -> Any:
        """The compiled step, for what the optimiser reads now besides its arguments.

        The step itself, with a RuntimeWarning, if that has no key or has changed KEPT times.
        """
        try:
            key, why = self._reads.key(), None
        except Unkeyed as error:
            key = why = str(error)
        if key not in self._calls and len(self._calls) >= KEPT:
            key = why = f"what the optimiser reads besides its arguments has changed {KEPT} times"
        if key not in self._calls:
            if why is not None:
                warnings.warn(f"train: steps are not compiled: {why}", RuntimeWarning, stacklevel=3)
            step = self._step
            self._calls[key] = step if why else self.backend.compiled(step, (0, 1, 2), lends=True)
        return self._calls[key]

    def _arguments(self, state: State, batches: Sequence[Batch], lr: float) -> tuple[Any, ...]:
        """The arguments of the compiled function."""
        inputs = {
            "batches": [self.loss.inputs(batch) for batch in batches],
            "shares": shares(batches),
            "numbers": [state.batches + i + 1 for i in range(len(batches))],
            "lr": lr,
        }
        leaves = tree.flatten(state.optimiser)
        self._numbers = [name for name, leaf in leaves.items() if type(leaf) in (int, float)]
        return state.params, state.optimiser, state.ema, inputs

    def _step(self, params: Any, optimiser: Any, average: Any, inputs: Any) -> Any:
        """Forward, backward, clipping, optimiser and average, as a function of arrays."""
        config = self.config
        weights = self.backend.cast_params(params, config.precision)

        def one(weights: Any, i: int) -> tuple[Array, Any]:
            key = ops.RandomKey(config.seed, step=inputs["numbers"][i])
            return self.loss.of(weights, inputs["batches"][i], key)

        value, grads = weighted(one, weights, inputs["shares"])
        if self.reduce is not None:
            grads = optim.reduced(grads, self.reduce)
        clip = math.inf if config.clip is None else config.clip
        clipped, norm = optim.clip_by_global_norm(grads, max_norm=clip, donate=True)
        options = {"lr": inputs["lr"], "donate": True}
        trained, optimiser = self.optimiser.step(
            tree.trained(params), clipped, optimiser, **options
        )
        if config.ema is not None:
            average = optim.ema(average, trained, decay=config.ema, donate=True)
        xp, leaves = array_namespace(value), tree.flatten(optimiser)
        # Python numbers that a step computes on a device are arrays there.
        counters = [n for n in self._numbers if not isinstance(leaves.get(n, 0), int | float)]
        counts = [leaves.pop(name) for name in counters]
        numbers = xp.stack([xp.astype(x, xp.float64) for x in (value, norm, *counts)])
        optimiser = tree.unflatten(optimiser, leaves | dict.fromkeys(counters, 0))
        return trained, optimiser, average, numbers, grads, counters
