"""Fine-tuning: AdamW on shuffled examples, the same on every backend."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer import ops, optim, tree
from xformer.backends import Backend
from xformer.finetune.base import Example, Task
from xformer.finetune.pairs import Contrastive
from xformer.training import Step, TrainConfig


def train(
    task: Task, params: Any, examples: Sequence[Example], config: TrainConfig, place: Backend
) -> Iterator[Step]:
    """Yields a `Step` after each of config.steps, without validation; its params are all of them.

    Frozen parameters stay as they are. Every epoch has another order, and a batch does not reach
    into the next one. ValueError where nothing is trained or there are too few examples;
    FloatingPointError, naming the step, where the loss is no longer finite.
    """
    trained = tree.trained(params)
    if not tree.flatten(trained):
        raise ValueError("train: all parameters are frozen")
    _require_pairs("train", task, min(config.batch_size, len(examples)))
    rng, state = np.random.default_rng(config.seed), optim.adamw_init(trained)
    batches, tokens, start = _batches(examples, config.batch_size, rng), 0, time.perf_counter()
    for step in range(1, config.steps + 1):
        batch = task.batch(next(batches), rng)
        loss, cache = task.loss(params, batch, place, ops.Key(config.seed, step=step))
        grads, norm = optim.clip_by_global_norm(cache.backward(), max_norm=config.clip)
        del cache  # the saved activations are not needed while the update is made
        lr = config.learning_rate(step)
        trained, state = optim.adamw(
            trained, grads, state, lr=lr, betas=config.betas, weight_decay=config.weight_decay
        )
        params = tree.join(params, trained)
        if not math.isfinite(float(loss)):
            raise FloatingPointError(f"the loss of step {step} is {float(loss)}; lr was {lr:.2e}")
        tokens += batch.n_tokens
        seconds = time.perf_counter() - start
        yield Step(step, float(loss), float(norm), lr, tokens, seconds, None, params)


def evaluate(
    task: Task,
    params: Any,
    examples: Sequence[Example],
    place: Backend,
    *,
    batch_size: int = 8,
    seed: int = 0,
) -> float:
    """The mean loss over all examples' targets, in nats, without dropout.

    The same seed hides the same tokens. ValueError where there are too few examples.
    """
    if not examples:
        raise ValueError("evaluate: there are no examples")
    _require_pairs("evaluate", task, min(batch_size, len(examples)))
    rng = np.random.default_rng(seed)
    total, count = 0.0, 0
    # About batch_size in each: a pair that is left alone would have nothing to be told from.
    for part in np.array_split(np.arange(len(examples)), max(1, len(examples) // batch_size)):
        batch = task.batch([examples[i] for i in part], rng)
        total += float(task.loss(params, batch, place)[0]) * batch.n_targets
        count += batch.n_targets
    return total / count


def _require_pairs(what: str, task: Task, n: int) -> None:
    """ValueError where a pair would be alone, with nothing to be told from: a loss of 0."""
    if isinstance(task, Contrastive) and n < 2:
        raise ValueError(f"{what}: a contrastive loss needs batches of at least 2 pairs, got {n}")


def _batches(
    examples: Sequence[Example], batch_size: int, rng: np.random.Generator
) -> Iterator[list[Example]]:
    """Batches without end; what is left of an epoch comes in the next one."""
    size = min(batch_size, len(examples))
    while True:
        order = rng.permutation(len(examples))
        for start in range(0, len(examples) - size + 1, size):
            yield [examples[i] for i in order[start : start + size]]
