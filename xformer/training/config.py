"""The configuration of training. A run stores it, and resuming compares it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xformer.base.choices import require_one_of
from xformer.dispatch.checks import number, plain_numbers, require_sizes
from xformer.dispatch.shapes import STORED
from xformer.optim import OPTIMISERS, Optimiser, Rule, Schedule, decay_matrices, grouped, schedules
from xformer.optim._checks import two_betas
from xformer.training.shuffle import require_seed

# Name -> schedule after the warmup, by the peak, the remaining steps and the final fraction.
SCHEDULES: dict[str, Callable[[float, int, float], Schedule]] = {
    "cosine": schedules.cosine,
    "linear": schedules.linear,
    "wsd": lambda lr, steps, final: schedules.wsd(lr, steps, final=final),
    "constant": lambda lr, steps, final: schedules.constant(lr),
}
NOAM = "noam"  # includes a warmup
OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.95)},
    "adamw": {"betas": (0.9, 0.95)},
    "lion": {"betas": (0.9, 0.99)},
    "sgd": {"momentum": 0.9},
}
# Name -> default weight decay. For adam and sgd, decay is added to the gradient (L2).
DECAY = dict.fromkeys(OPTIMISERS, 0.1) | {"adam": 0.0, "sgd": 0.0}


@dataclass(frozen=True)
class TrainConfig:
    """The configuration of training. ValueError for bad values, TypeError for other types."""

    steps: int
    batch_size: int = 8  # of each batch of a source
    accumulate: int = 1  # batches a step (gradient accumulation)
    optimiser: str = "adamw"  # one of `optim.OPTIMISERS`
    lr: float = 3e-3  # the peak learning rate
    schedule: str = "cosine"  # one of `SCHEDULES`, or noam
    warmup: int = 50  # steps of linear warmup
    final_lr: float = 0.1  # fraction of the peak after the last step, if the schedule decays
    betas: tuple[float, float] | None = None  # of adam, adamw, lion; None: as in `OPTIONS`
    weight_decay: float | None = None  # of arrays with two or more axes; None: as in `DECAY`
    clip: float | None = 1.0  # the largest global gradient norm; None: no clipping
    ema: float | None = None  # decay of an exponential moving average of the parameters
    eval_every: int = 100  # steps between validations
    eval_batches: int = 8
    patience: int | None = None  # stop after this many validations without a better one
    # Diverged if the running mean of losses is above this multiple of the first loss (or of 1 nat).
    diverged: float | None = 3.0
    seed: int = 0
    precision: str | None = None  # of weights and activations, one of `STORED`; None: not rounded

    def __post_init__(self) -> None:
        plain_numbers(self)
        counts = ("steps", "batch_size", "accumulate", "eval_every", "eval_batches", "patience")
        sizes = {name: getattr(self, name) for name in counts}
        require_sizes("TrainConfig", 1, **{k: n for k, n in sizes.items() if n is not None})
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
            require_one_of(f"TrainConfig: {name}", getattr(self, name), known)

    def learning_rate(self) -> Schedule:
        """The schedule: lr * step / warmup up to the peak, as in llm.c, then the decay."""
        warmup = min(self.warmup, self.steps)
        if self.schedule == NOAM:
            warmup = max(warmup, 1)
            return schedules.noam(1, warmup, factor=self.lr * math.sqrt(warmup))
        left = max(self.steps - warmup, 1)
        return schedules.warmup(SCHEDULES[self.schedule](self.lr, left, self.final_lr), warmup)

    def chosen_optimiser(self) -> Optimiser:
        """The optimiser. Biases and norms do not decay. Muon updates only matrices in blocks."""
        name, decay = self.optimiser, self.weight_decay
        if decay is None:
            decay = DECAY[name]
        first: tuple[Rule, ...] = ()
        if name == "muon":
            options = {"match_adamw": True, "weight_decay": decay}
            first = (Rule("*.blocks.*", "muon", options=options, min_ndim=2),)
            name = "adamw"
        rule_options = dict(OPTIONS.get(name, {}))
        if self.betas is not None and "betas" in rule_options:
            rule_options["betas"] = tuple(self.betas)
        return grouped(*first, *decay_matrices(name, decay, **rule_options))
