"""How to train, as data: what a run's folder keeps, and what resuming compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xformer.checks import number
from xformer.optim import OPTIMISERS, Optimiser, Rule, Schedule, decay_matrices, grouped, schedules

# Name -> schedule after the warm-up, of the peak, the steps that are left, and the final share.
SCHEDULES: dict[str, Callable[[float, int, float], Schedule]] = {
    "cosine": schedules.cosine,
    "linear": schedules.linear,
    "wsd": lambda lr, steps, final: schedules.wsd(lr, steps, final=final),
    "constant": lambda lr, steps, final: schedules.constant(lr),
}
NOAM = "noam"  # brings its own warm-up
OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.95)},
    "adamw": {"betas": (0.9, 0.95)},
    "lion": {"betas": (0.9, 0.99)},
    "sgd": {"momentum": 0.9},
}


@dataclass(frozen=True)
class TrainConfig:
    """How to train. ValueError for numbers that make no sense."""

    steps: int
    batch_size: int = 8  # of each batch that a source makes
    accumulate: int = 1  # batches in a step, whose gradients are those of one
    optimiser: str = "adamw"  # one of `optim.OPTIMISERS`
    lr: float = 3e-3  # at its peak
    schedule: str = "cosine"  # one of `SCHEDULES`, or noam
    warmup: int = 50  # steps of linear rise
    final_lr: float = 0.1  # share of the peak after the last step, where a schedule falls
    betas: tuple[float, float] | None = None  # of adam, adamw, lion; unless given as `OPTIONS`
    weight_decay: float = 0.1  # of parameters of two dimensions and more
    clip: float | None = 1.0  # global norm
    ema: float | None = None  # decay of a moving average of the parameters
    eval_every: int = 100
    eval_batches: int = 8
    patience: int | None = None  # validations without a better one before training ends
    diverged: float | None = 3.0  # times the first loss, at least 1 nat: too much for the mean
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "eval_every", "eval_batches", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("seed", "warmup"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("weight_decay", "clip", "diverged", "final_lr"):
            if getattr(self, name) is not None:
                number("TrainConfig", name, getattr(self, name), low=0)
        if self.ema is not None:
            number("TrainConfig", "ema", self.ema, low=0, high=1)
        for name, known in (("optimiser", OPTIMISERS), ("schedule", (*SCHEDULES, NOAM))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )

    def learning_rate(self) -> Schedule:
        """The schedule: lr * step / warmup up to the peak, as llm.c rises, and then its fall."""
        warmup = min(self.warmup, self.steps)
        if self.schedule == NOAM:
            warmup = max(warmup, 1)
            return schedules.noam(1, warmup, factor=self.lr * math.sqrt(warmup))
        left = max(self.steps - warmup, 1)
        return schedules.warmup(SCHEDULES[self.schedule](self.lr, left, self.final_lr), warmup)

    def chosen_optimiser(self) -> Optimiser:
        """The optimiser; biases and norms do not decay. Muon is for matrices inside blocks only."""
        name = self.optimiser
        first: tuple[Rule, ...] = ()
        if name == "muon":
            options = {"match_adamw": True, "weight_decay": self.weight_decay}
            first = (Rule("*.blocks.*", "muon", options=options, min_ndim=2),)
            name = "adamw"
        own = dict(OPTIONS.get(name, {}))
        if self.betas is not None and "betas" in own:
            own["betas"] = tuple(self.betas)
        return grouped(*first, *decay_matrices(name, self.weight_decay, **own))
