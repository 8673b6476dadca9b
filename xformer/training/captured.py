"""Training steps as calls of `Backend.captured`: all of them arrays in, arrays out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from array_api_compat import array_namespace

from xformer import ops, optim, tree
from xformer.backends import Backend
from xformer.optim import Optimiser
from xformer.optim.accumulate import shares, weighted
from xformer.training.batch import Batch
from xformer.training.config import TrainConfig
from xformer.training.loss import Loss, ModelLoss
from xformer.training.state import State
from xformer.typing import Array

Reduce = Callable[[Array], Array]  # as of `optim.reduced`


class CapturedSteps:
    """What `train` calls for its captured steps.

    The trained parameters, the optimiser's arrays and the moving average are the state of the call;
    batches, their shares and numbers, the learning rate and the optimiser's counters its inputs.
    """

    @classmethod
    def of(
        cls,
        loss: Loss,
        config: TrainConfig,
        place: Backend,
        optimiser: Optimiser,
        reduce: Reduce | None = None,
    ) -> CapturedSteps | None:
        """None, and a RuntimeWarning, where steps are to be made as ever."""
        why = None
        if config.precision == "float16":
            why = "how float16's loss is scaled follows from the gradients of the step"
        elif not isinstance(loss, ModelLoss):
            why = "the loss is no loss_of(model), whose work on the host is known"
        else:
            steps = cls(loss, config, place, optimiser, reduce)
            if steps.call is not None:
                return steps
            why = f"backend {place.name} has no such thing"
        warnings.warn(f"train: steps are not captured: {why}", RuntimeWarning, stacklevel=4)
        return None

    def __init__(
        self,
        loss: ModelLoss,
        config: TrainConfig,
        place: Backend,
        optimiser: Optimiser,
        reduce: Reduce | None,
    ) -> None:
        self.reduce = reduce
        self.loss, self.config, self.place, self.optimiser = loss, config, place, optimiser
        self.call: Any = place.captured(self._step)  # None: there is no such thing
        self._state: Any = None  # of the call, as trees with numbers, and all parameters

    def __call__(
        self, state: State, batches: Sequence[Batch], lr: float
    ) -> tuple[tuple[Any, Any, Any], tuple[float, float], Any]:
        """Trained parameters, optimiser's state and average after a step; loss and norm; gradients.

        ValueError for a batch without targets, or with ids that the model has not.
        """
        parts = tree.trained(state.params), state.optimiser, state.ema
        self._state = parts, state.params
        leaves = tree.flatten(parts)
        counters = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, int)}
        arrays = {name: leaf for name, leaf in leaves.items() if name not in counters}
        inputs = {
            "batches": [self.loss.inputs(batch) for batch in batches],
            "shares": shares(batches),
            "numbers": [state.batches + i + 1 for i in range(len(batches))],
            "lr": lr,
            "counters": counters,
        }
        new, (numbers, grads) = self.call(arrays, inputs)
        found, size, *counts = self.place.to_numpy(numbers).tolist()
        counted = dict(zip(counters, map(int, counts), strict=True))
        return tree.unflatten(parts, new | counted), (found, size), grads

    def _step(self, state: dict[str, Array], inputs: Any) -> tuple[dict[str, Array], Any]:
        """Forward, backward, clipping, optimiser and average: a function of arrays."""
        like, all_params = self._state
        trained, own, average = tree.unflatten(like, state | inputs["counters"])
        config = self.config
        weights = self.place.weights(tree.join(all_params, trained), config.precision)

        def one(weights: Any, i: int) -> tuple[Array, Any]:
            key = ops.Key(config.seed, step=inputs["numbers"][i])
            return self.loss.of(weights, inputs["batches"][i], key)

        value, grads = weighted(one, weights, inputs["shares"])
        if self.reduce is not None:
            grads = optim.reduced(grads, self.reduce)
        clip = math.inf if config.clip is None else config.clip
        clipped, norm = optim.clip_by_global_norm(grads, max_norm=clip, donate=True)
        options = {"lr": inputs["lr"], "donate": True}
        trained, own = self.optimiser.step(trained, clipped, own, **options)
        if config.ema is not None:
            average = optim.ema(average, trained, decay=config.ema, donate=True)
        new = tree.flatten((trained, own, average))
        xp = array_namespace(value)
        counts = [new.pop(name) for name in inputs["counters"]]
        numbers = xp.stack([xp.astype(x, xp.float64) for x in (value, norm, *counts)])
        return new, (numbers, grads)
