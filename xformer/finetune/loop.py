"""The fine-tuning loop: training on a task's examples, in the same order on every backend."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xformer import backends, training
from xformer.backends import Backend
from xformer.base import tree
from xformer.base.files import remove_parts
from xformer.distributed.world import World
from xformer.finetune import lora
from xformer.finetune.base_task import Example, Task
from xformer.finetune.measures import measure
from xformer.finetune.pairs import Contrastive
from xformer.finetune.saving import save
from xformer.optim import Optimiser
from xformer.sentences.settings import settings_files
from xformer.training import Batch, Rows, Run, State, Step, TrainConfig
from xformer.training.state import digest


def train(
    task: Task,
    params: Any,
    examples: Sequence[Example],
    config: TrainConfig,
    backend: str | Backend,
    held_out: Sequence[Example] = (),
    *,
    optimiser: Optimiser | None = None,
    donate: bool = False,
    world: World | None = None,
) -> Iterator[Step]:
    """Yield the steps of `training.train` on a task's examples. Frozen parameters do not change.

    At each validation, a step of a classifier or a tagger has its accuracy and F1 (`measure`).

    All fields of config have the meaning that they have in `training.train`. With
    config.accumulate, a step has the gradients of one large batch, up to rounding; but a
    contrastive loss has negatives from one batch only.

    params: all parameters; or the `State` to train on from, which `training.start` or `Run.begin`
        returned (`finetune.run`). Training is then the same as if it had never been stopped.
    held_out: examples to validate on, every config.eval_every steps and after the last step
    optimiser: used instead of the one in config; a State must be of it
    donate: the next step may overwrite the arrays of a state; the first step, the arrays of params
    world: the processes that train together, as in `training.train`; None: this one alone
    ValueError if all parameters are frozen or there are too few examples. Diverged if the loss or a
    gradient is not finite, or the loss has grown too much.
    """
    sizes = config.batch_size, config.seed
    source = _source("train", task, examples, *sizes)
    batches: list[Batch] = []
    if held_out:
        batches += _source("train", task, held_out, *sizes).held_out()
    options: Any = {"held_out": batches, "optimiser": optimiser, "donate": donate, "world": world}
    state = params if isinstance(params, State) else training.start(params, config, optimiser)
    steps = training.train(task, state, source, config, backend, **options)

    def measured(step: Step) -> Step:
        if step.validation is None:
            return step
        how = {"batch_size": config.batch_size}
        found = measure(task, step.state.averaged, held_out, backend, **how)
        return step._replace(measures=found)

    return map(measured, steps) if held_out else steps


def run(
    folder: str | os.PathLike[str],
    task: Task,
    params: Any,
    examples: Sequence[Example],
    config: TrainConfig,
    backend: str | Backend,
    held_out: Sequence[Example] = (),
    *,
    base: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Run:
    """A `training.Run` of fine-tuning, which can be stopped at any time and resumed.

    The folder gets the best model so far, as `save` writes it, a log and checkpoints. Checkpoints
    have only what is trained: with LoRA, the adapters and their optimiser state.

        with finetune.run(folder, task, params, examples, config, backend, held_out) as run:
            state = run.begin(training.start(params, config))
            steps = finetune.train(task, state, examples, config, backend, held_out)
            for step in run.record(steps): ...

    params: all parameters before the first step, also if the run is resumed
    base: the folder of the original model, for `save`
    options: of `Run`: every, keep, notes, free, world

    ValueError for a model without hf_config, and if there are too few examples. PretrainedError for
    a damaged modules.json in `base`. A run can only be
    resumed with the same model, parameters, adapters, task, config and examples; otherwise entering
    it raises ValueError, which names the differences.
    """
    about = about_of(task, params, examples, config, backend, held_out)
    if base is not None and Path(base).is_dir():
        settings_files(base)  # raises at once for what could not be copied

    def write(params: Any) -> None:
        for path in Path(folder).iterdir():  # parts that a killed `save` left in the subfolders
            remove_parts(path)
        save(task.model, params, folder, tokenizer=task.tokenizer, base=base)

    return Run(folder, backend, about, write_model=write, **options)


def about_of(
    task: Task,
    params: Any,
    examples: Sequence[Example],
    config: TrainConfig,
    backend: str | Backend,
    held_out: Sequence[Example] = (),
) -> dict[str, Any]:
    """What a run stores of its model, task, configuration and data. Arguments as of `run`."""
    source = getattr(task.model, "hf_config", None)
    if source is None:
        raise ValueError("run: the model must be a pretrained one, with an hf_config")
    kept = ("model", "tokenizer")  # fields of all tasks; what the tokenizer does is in the examples
    fields = [field.name for field in dataclasses.fields(task) if field.name not in kept]
    sizes = config.batch_size, config.seed
    return {
        "model": {
            "name": type(task.model).__name__,
            "source": dict(source),
            "parameters": digest(tree.flatten(params), backends.get(backend)),
        },
        "task": {"name": type(task).__name__} | {name: getattr(task, name) for name in fields},
        "adapters": {
            name: {"rank": tree.value(node.a).shape[1], "scale": node.scale.value}
            for name, node in lora.adapters(params).items()
        },
        "training": dataclasses.asdict(config),
        "data": {
            "training": _source("run", task, examples, *sizes).fingerprint(),
            "validation": _source("run", task, held_out, *sizes).fingerprint() if held_out else "",
        },
    }


def evaluate(
    task: Task,
    params: Any,
    examples: Sequence[Example],
    backend: str | Backend,
    *,
    batch_size: int = 8,
    seed: int = 0,
    progress: Callable[[int], Any] | None = None,
    world: World | None = None,
) -> float:
    """The mean loss in nats over the targets of all examples, without dropout.

    seed: of masked tokens
    progress: called with the number of examples after each batch
    world: processes that share the batches, and get the same bits as one process
    ValueError if there are too few examples.
    """
    if not examples:
        raise ValueError("evaluate: there are no examples")
    batches = _source("evaluate", task, examples, batch_size, seed).held_out()
    watched = batches if progress is None else _counted(batches, progress)
    mean_loss = training.evaluate(task, params, watched, backend, world=world)
    assert mean_loss is not None  # every example has a target
    return mean_loss


def _source(what: str, task: Task, examples: Sequence[Example], batch_size: int, seed: int) -> Rows:
    """The batches of examples. ValueError, which begins with `what`, if they are too few.

    The loss of a contrastive task is always 0 for one pair.
    """
    n = min(batch_size, len(examples))
    if isinstance(task, Contrastive) and n < 2:
        raise ValueError(f"{what}: a contrastive loss needs batches of at least 2 pairs, got {n}")
    return Rows(examples, batch_size, task.batch, seed)


def _counted(batches: Iterable[Batch], progress: Callable[[int], Any]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        progress(len(batch.arrays[0]))
