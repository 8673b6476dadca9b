"""Learning-rate schedules.

A schedule is a function from the number of a step, counted from 1, to a learning rate:

    schedule = warmup(cosine(6e-4, 1_900, final=0.1), 100, how="nanogpt")
    schedule(1), schedule(2), ...

Programs use the same formulas, but their steps differ by one. Here the first step of a decay has
the full rate, and the step after its last has the final rate, as in `transformers`, nanoGPT and
llm.c. The warm-ups of these programs differ; `warmup(how=)` selects one by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from xformer.base.choices import require_one_of
from xformer.dispatch.checks import finite, number, require_sizes, whole

Schedule: TypeAlias = Callable[[int], float]

# Name -> the fraction of the full rate at step s of w.
RISES: dict[str, Callable[[int, int], float]] = {
    "from_zero": lambda s, w: (s - 1) / w,  # transformers: the first step has rate 0
    "nanogpt": lambda s, w: s / (w + 1),
    "llm.c": lambda s, w: s / w,  # the last step of the warm-up has the full rate
}

# Name -> a function from the fraction of the decay that is done to the fraction that is left.
FALLS: dict[str, Callable[[float], float]] = {
    "1-sqrt": lambda done: 1 - math.sqrt(done),  # arXiv:2405.18392, llm.c
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


def constant(lr: float) -> Schedule:
    """lr at every step. ValueError for a negative lr."""
    lr = finite("constant", "lr", lr, low=0)

    def schedule(step: int) -> float:
        _counted("constant", step)
        return lr

    return schedule


def linear(lr: float, steps: int, final: float = 0.0) -> Schedule:
    """Linear decay from lr at step 1 to final * lr after `steps` steps; constant from then on.

    ValueError for a negative lr, steps below 1 and final outside [0, 1].
    """
    return _fall("linear", lr, steps, final, FALLS["linear"])


def cosine(lr: float, steps: int, final: float = 0.0) -> Schedule:
    """Cosine decay from lr at step 1 to final * lr after `steps` steps; constant from then on.

    arXiv:1608.03983 without restarts. ValueError for a negative lr, steps below 1 and final outside
    [0, 1].
    """
    return _fall("cosine", lr, steps, final, FALLS["cosine"])


def inverse_sqrt(lr: float, timescale: int) -> Schedule:
    """lr * (timescale / (timescale + step - 1))^1/2, without a last step.

    After a warm-up of `timescale` steps it is lr * (timescale / steps so far)^1/2, as in T5
    (arXiv:1910.10683, section 3.1.2). ValueError for a negative lr and a timescale below 1.
    """
    lr = finite("inverse_sqrt", "lr", lr, low=0)
    (timescale,) = require_sizes("inverse_sqrt", 1, timescale=timescale)

    def schedule(step: int) -> float:
        past = _counted("inverse_sqrt", step) - 1
        return lr * math.sqrt(timescale / (timescale + past))

    return schedule


def noam(d_model: int, warmup: int, factor: float = 1.0) -> Schedule:
    """factor * d_model^-1/2 * min(step^-1/2, step * warmup^-3/2) (arXiv:1706.03762, eq. 3).

    The formula includes the warm-up. The peak is factor * (d_model * warmup)^-1/2, at step
    `warmup`. ValueError for sizes below 1 and a negative factor.
    """
    d_model, warmup = require_sizes("noam", 1, d_model=d_model, warmup=warmup)
    factor = number("noam", "factor", factor, low=0)

    def schedule(step: int) -> float:
        step = _counted("noam", step)
        return factor * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)

    return schedule


def wsd(
    lr: float, steps: int, decay: float = 0.2, shape: str = "1-sqrt", final: float = 0.0
) -> Schedule:
    """Warm-up, stable, decay (arXiv:2404.06395), without the warm-up: lr, then a decay at the end.

    decay: how many of the `steps` belong to the decay, as a fraction (a float) or a number (an
        int).
    shape: the decay to final * lr: "1-sqrt" (arXiv:2405.18392), "linear" or "cosine".

    ValueError for a negative lr, steps below 1, final outside [0, 1], a decay outside [0, 1] or
    [1, steps], and another shape.
    """
    require_one_of("wsd: shape", shape, FALLS)
    (steps,) = require_sizes("wsd", 1, steps=steps)
    if whole(decay) is not None:
        n_decay = int(number("wsd", "decay", decay, low=1, high=steps))
    else:
        stable = int((1 - number("wsd", "decay", decay, low=0, high=1)) * steps)
        n_decay = max(steps - stable, 1)
    falling = _fall("wsd", lr, n_decay, final, FALLS[shape])
    return then(constant(lr), steps - n_decay, falling)


def warmup(schedule: Schedule, steps: int, how: str = "llm.c") -> Schedule:
    """A warm-up to schedule(1) over `steps` steps, then `schedule` from its step 1.

    steps: 0 for no warm-up.
    how: the rate at step s, divided by schedule(1): "from_zero" is (s - 1) / steps, "nanogpt" is
        s / (steps + 1), "llm.c" is s / steps.

    ValueError for another `how`, and for steps below 0.
    """
    require_one_of("warmup: how", how, RISES)
    (steps,) = require_sizes("warmup", 0, steps=steps)
    return then(lambda step: schedule(1) * RISES[how](step, steps), steps, schedule)


def then(first: Schedule, steps: int, second: Schedule) -> Schedule:
    """`first` for `steps` steps, then `second` from its step 1. ValueError for steps < 0."""
    (steps,) = require_sizes("then", 0, steps=steps)

    def schedule(step: int) -> float:
        step = _counted("then", step)
        return first(step) if step <= steps else second(step - steps)

    return schedule


def _fall(op: str, lr: float, steps: int, final: float, left: Callable[[float], float]) -> Schedule:
    """A decay from lr at step 1 to final * lr after `steps` steps, by `left` (see `FALLS`)."""
    lr = finite(op, "lr", lr, low=0)
    final = number(op, "final", final, low=0, high=1)
    (steps,) = require_sizes(op, 1, steps=steps)

    def schedule(step: int) -> float:
        done = min((_counted(op, step) - 1) / steps, 1.0)
        return lr * (final + (1 - final) * left(done))

    return schedule


def _counted(op: str, step: int) -> int:
    """The step as an int. ValueError if it is below 1: steps are counted from 1."""
    (step,) = require_sizes(op, 1, step=step)
    return step
