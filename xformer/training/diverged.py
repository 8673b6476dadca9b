"""Divergence: stop training if the loss or a gradient is not finite or has grown too much."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.training.config import TrainConfig
from xformer.training.state import State


class Diverged(FloatingPointError):
    """A loss, a gradient or a validation loss is not finite, or the loss has grown too much."""


def quiet() -> np.errstate:
    """A context without NumPy's warnings of overflow: `require_sound` says what they lead to.

    What the user has set by `numpy.seterr` stays.
    """
    kinds: dict[str, Any] = {k: "ignore" for k, what in np.geterr().items() if what == "warn"}
    return np.errstate(**kinds)


def require_sound(
    state: State, loss: float, norm: float, grads: Any, config: TrainConfig, lr: float
) -> None:
    """Raise Diverged if loss or norm is not finite, or if the mean loss has grown too much.

    The mean loss has grown too much if `state.mean` is above config.diverged times the first loss
    (or times 1 nat, if the first loss is lower). None for config.diverged: no limit.

    state: the state before the step, except that `state.mean` includes `loss`
    loss: of the step
    norm: of the step's gradients, before clipping
    grads, lr: of the step, used only for the message
    """
    what = f"the loss of step {state.step + 1} is {loss}, the norm of its gradient {norm:.3g}"
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise Diverged(f"{what}{_culprit(grads, norm)}; lr was {lr:.2e}")
    limit = math.inf if config.diverged is None else config.diverged * max(state.first, 1.0)
    if state.mean > limit:
        raise Diverged(
            f"{what}; the recent mean loss, {state.mean:.3g}, is above {limit:.3g}, "
            f"{config.diverged:g} times that of the first step; lr was {lr:.2e}"
        )


def _culprit(grads: Any, norm: float) -> str:
    """The names of gradients that are not finite; the largest gradient if only the norm is not."""
    leaves = tree.flatten(grads)
    names = [name for name, g in leaves.items() if not is_finite(g)]
    if names:
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        return f"; not finite: the gradient of {names[0]}{more}"
    if math.isfinite(norm):
        return ""
    xp = array_namespace(*leaves.values())
    sizes = {name: float(xp.max(xp.abs(g))) for name, g in leaves.items()}
    name = max(sizes, key=sizes.__getitem__)
    return f"; each gradient is finite, that of {name} up to {sizes[name]:.3g}"


def is_finite(array: Array) -> bool:
    """Whether all numbers of `array` are finite. Synchronises a device."""
    xp = array_namespace(array)
    return bool(xp.all(xp.isfinite(array)))
