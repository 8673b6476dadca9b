"""The training loop: any model with `loss`, any backend."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xformer import ops, optim
from xformer.backends import Backend
from xformer.training.data import Corpus, fixed_windows, windows


@dataclass(frozen=True)
class TrainConfig:
    """How to train. ValueError for numbers that make no sense."""

    steps: int
    batch_size: int
    lr: float = 3e-3  # at its peak
    warmup: int = 50  # steps of linear rise
    final_lr: float = 0.1  # share of the peak at the end of the cosine
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0  # global norm
    eval_every: int = 100
    eval_batches: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def learning_rate(self, step: int) -> float:
        """Of step 1, 2, ...: lr * step / warmup while rising, then a cosine to final_lr * lr."""
        warmup = min(self.warmup, self.steps)
        if step <= warmup:
            return self.lr * step / warmup
        done = (step - warmup) / max(self.steps - warmup, 1)
        share = self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * share


class Step(NamedTuple):
    """What a training step reports."""

    step: int  # from 1
    loss: float  # nats per token of its batch
    norm: float  # of the gradients, before clipping
    lr: float
    tokens: int  # seen since the start
    seconds: float  # since the start, validation included
    validation: float | None  # nats per token, where it was measured
    params: Any  # after the step


def train(
    model: Any, params: Any, corpus: Corpus, config: TrainConfig, backend: Backend
) -> Iterator[Step]:
    """AdamW on random windows of the corpus: yields a `Step` after each of config.steps.

    model: with `loss(params, tokens, targets, dropout_key=)` and `max_len`. The same seed gives
    the same batches and dropout masks on every backend. Raises FloatingPointError, naming the
    step, where the loss is no longer finite.
    """
    batches = windows(
        corpus.train, length=model.max_len, batch_size=config.batch_size, seed=config.seed
    )
    held_out = fixed_windows(
        corpus.validation,
        length=model.max_len,
        batch_size=config.batch_size,
        n_batches=config.eval_batches,
    )
    state = optim.adamw_init(params)
    start = time.perf_counter()
    for step in range(1, config.steps + 1):
        tokens, targets = (backend.asarray(a) for a in next(batches))
        key = ops.Key(config.seed, step=step)
        loss, cache = model.loss(params, tokens, targets, dropout_key=key)
        grads, norm = optim.clip_by_global_norm(cache.backward(), max_norm=config.clip)
        del cache  # the saved activations are not needed while the update is made
        lr = config.learning_rate(step)
        params, state = optim.adamw(
            params, grads, state, lr=lr, betas=config.betas, weight_decay=config.weight_decay
        )
        if not math.isfinite(float(loss)):
            raise FloatingPointError(f"the loss of step {step} is {float(loss)}; lr was {lr:.2e}")
        measured = step % config.eval_every == 0 or step == config.steps
        yield Step(
            step,
            float(loss),
            float(norm),
            lr,
            step * config.batch_size * model.max_len,
            time.perf_counter() - start,
            evaluate(model, params, held_out, backend) if measured else None,
            params,
        )


def evaluate(
    model: Any, params: Any, batches: list[tuple[np.ndarray, np.ndarray]], backend: Backend
) -> float:
    """Mean loss in nats per token over the batches, without dropout."""
    losses = [
        float(model.loss(params, backend.asarray(tokens), backend.asarray(targets))[0])
        for tokens, targets in batches
    ]
    return sum(losses) / len(losses)
