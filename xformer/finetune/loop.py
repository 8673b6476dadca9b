"""Fine-tuning: the training loop on a task's examples, shuffled alike on every backend."""

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
    """`training.train` from its first step; frozen parameters stay as they are.

    held_out: examples to validate on every config.eval_every steps and after the last, as
    `evaluate` does. donate: as there, so that params may be written over too. ValueError where
    nothing is trained or there are too few examples; Diverged as there.
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
    """The mean loss over all examples' targets, in nats, without dropout.

    The same seed hides the same tokens. progress: called with the number of examples after each
    batch. ValueError where there are too few examples.
    """
    if not examples:
        raise ValueError("evaluate: there are no examples")
    _require_pairs("evaluate", task, min(batch_size, len(examples)))
    batches = Rows(examples, batch_size, task.batch, seed).held_out()
    watched = batches if progress is None else _counted(batches, progress)
    found = training.evaluate(TaskLoss(task), params, watched, place)
    assert found is not None  # every example has a target
    return found


def _counted(batches: Iterable[Batch], progress: Callable[[int], Any]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        progress(len(batch.arrays[0]))


def _require_pairs(what: str, task: Task, n: int) -> None:
    """ValueError where a pair would be alone, with nothing to be told from: a loss of 0."""
    if isinstance(task, Contrastive) and n < 2:
        raise ValueError(f"{what}: a contrastive loss needs batches of at least 2 pairs, got {n}")
