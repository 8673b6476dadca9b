"""How to train, as data: what a run's folder keeps, and what resuming compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xformer.checks import number, plain_numbers, require_sizes
from xformer.optim import OPTIMISERS, Optimiser, Rule, Schedule, decay_matrices, grouped, schedules
from xformer.optim._checks import two_betas
from xformer.shapes import STORED
from xformer.training.shuffle import require_seed

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
# Name -> weight decay unless it is given. Of the last two it is a part of the gradient.
DECAY = dict.fromkeys(OPTIMISERS, 0.1) | {"adam": 0.0, "sgd": 0.0}


@dataclass(frozen=True)
class TrainConfig:
    """How to train. ValueError for numbers that make no sense, TypeError for what is no number."""

    steps: int
    batch_size: int = 8  # of each batch that a source makes
    accumulate: int = 1  # batches in a step, whose gradients are those of one
    optimiser: str = "adamw"  # one of `optim.OPTIMISERS`
    lr: float = 3e-3  # at its peak
    schedule: str = "cosine"  # one of `SCHEDULES`, or noam
    warmup: int = 50  # steps of linear rise
    final_lr: float = 0.1  # share of the peak after the last step, where a schedule falls
    betas: tuple[float, float] | None = None  # of adam, adamw, lion; unless given as `OPTIONS`
    weight_decay: float | None = None  # of two dimensions and more; unless given as `DECAY`
    clip: float | None = 1.0  # global norm; None: gradients stay as they are
    ema: float | None = None  # decay of a moving average of the parameters
    eval_every: int = 100
    eval_batches: int = 8
    patience: int | None = None  # validations without a better one before training ends
    diverged: float | None = 3.0  # times the first loss, at least 1 nat: too much for the mean
    seed: int = 0
    precision: str | None = None  # of weights and activations, one of `STORED`; None: the dtype's

    def __post_init__(self) -> None:
        plain_numbers(self)
        counts = ("steps", "batch_size", "accumulate", "eval_every", "eval_batches", "patience")
        given = {name: getattr(self, name) for name in counts}
        require_sizes("TrainConfig", 1, **{k: n for k, n in given.items() if n is not None})
        require_sizes("TrainConfig", 0, warmup=self.warmup)
        require_seed("TrainConfig", self.seed)
        for name in ("lr", "weight_decay", "clip", "diverged", "final_lr", "ema"):
            if getattr(self, name) is not None or name in ("lr", "final_lr"):
                high = 1 if name in ("final_lr", "ema") else math.inf
                number("TrainConfig", name, getattr(self, name), low=0, high=high)
        for name in ("lr", "weight_decay"):
            if getattr(self, name) == math.inf:
                raise ValueError(f"TrainConfig: {name} must be finite, got inf")
        if self.clip in (0, math.inf):
            raise ValueError(
                f"TrainConfig: clip must be above 0 and finite, or None for no clipping, "
                f"got {self.clip}"
            )
        if self.betas is not None:
            two_betas("TrainConfig", self.betas)
        names = {"optimiser": tuple(OPTIMISERS), "schedule": (*SCHEDULES, NOAM)}
        if self.precision is not None:
            names["precision"] = STORED
        for name, known in names.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"TrainConfig: {name} must be one of {', '.join(known)}, "
                    f"got {getattr(self, name)!r}"
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
        name, decay = self.optimiser, self.weight_decay
        if decay is None:
            decay = DECAY[name]
        first: tuple[Rule, ...] = ()
        if name == "muon":
            options = {"match_adamw": True, "weight_decay": decay}
            first = (Rule("*.blocks.*", "muon", options=options, min_ndim=2),)
            name = "adamw"
        own = dict(OPTIONS.get(name, {}))
        if self.betas is not None and "betas" in own:
            own["betas"] = tuple(self.betas)
        return grouped(*first, *decay_matrices(name, decay, **own))
