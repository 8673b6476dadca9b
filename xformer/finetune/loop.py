"""The fine-tuning loop: training on a task's examples, in the same order on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xformer import training
from xformer.backends import Backend
from xformer.finetune.base import Example, Task, TaskLoss
from xformer.finetune.pairs import Contrastive
from xformer.training import Batch, Rows, Step, TrainConfig


def train(
    task: Task,
    params: Any,
    examples: Sequence[Example],
    config: TrainConfig,
    place: Backend,
    held_out: Sequence[Example] = (),
    *,
    donate: bool = False,
) -> Iterator[Step]:
    """Yield the steps of `training.train` on a task's examples. Frozen parameters do not change.

    held_out: examples to validate on, every config.eval_every steps and after the last step
    donate: the next step may overwrite the arrays of a state; the first step, the arrays of params
    ValueError if all parameters are frozen or there are too few examples. Diverged if the loss or a
    gradient is not finite, or the loss has grown too much.
    """
    _require_pairs("train", task, min(config.batch_size, len(examples)))
    source = Rows(examples, config.batch_size, task.batch, config.seed)
    batches: list[Batch] = []
    if held_out:
        _require_pairs("train", task, min(config.batch_size, len(held_out)))
        batches += Rows(held_out, config.batch_size, task.batch, config.seed).held_out()
    options: Any = {"held_out": batches, "donate": donate}
    state = training.start(params, config)
    yield from training.train(TaskLoss(task), state, source, config, place, **options)


def evaluate(
    task: Task,
    params: Any,
    examples: Sequence[Example],
    place: Backend,
    *,
    batch_size: int = 8,
    seed: int = 0,
    progress: Callable[[int], Any] | None = None,
) -> float:
    """The mean loss in nats over the targets of all examples, without dropout.

    seed: of masked tokens
    progress: called with the number of examples after each batch
    ValueError if there are too few examples.
    """
    if not examples:
        raise ValueError("evaluate: there are no examples")
    _require_pairs("evaluate", task, min(batch_size, len(examples)))
    batches = Rows(examples, batch_size, task.batch, seed).held_out()
    watched = batches if progress is None else _counted(batches, progress)
    mean_loss = training.evaluate(TaskLoss(task), params, watched, place)
    assert mean_loss is not None  # every example has a target
    return mean_loss


def _counted(batches: Iterable[Batch], progress: Callable[[int], Any]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        progress(len(batch.arrays[0]))


def _require_pairs(what: str, task: Task, n: int) -> None:
    """ValueError for a contrastive task with batches of one pair, whose loss is always 0."""
    if isinstance(task, Contrastive) and n < 2:
        raise ValueError(f"{what}: a contrastive loss needs batches of at least 2 pairs, got {n}")
