"""`xformer finetune`: train a pretrained model on own data; transformers loads the result."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xformer import backends, finetune, training
from xformer.backends import Backend
from xformer.base import tree
from xformer.cli import config_file, finetune_options
from xformer.cli.finetune_options import FinetuneOptions
from xformer.cli.multiprocess import description, optimiser_of, together
from xformer.cli.open_model import is_own, kernels_of, opened
from xformer.cli.parser import Parser
from xformer.cli.progress import each
from xformer.cli.run_options import ABOUT_ENDS, add_options, config_of, dashed, how_to_resume, kept
from xformer.cli.steps import say_why, shown
from xformer.cli.summary import title
from xformer.cli.texts import watched
from xformer.cli.train import folder_of
from xformer.distributed.world import World
from xformer.finetune import Record, Task, TrainConfig, lora, peft
from xformer.finetune.loop import about_of
from xformer.finetune.saving import ADAPTER
from xformer.pretrained.convert import as_llama
from xformer.sentences import rank_settings, settings
from xformer.training import Diverged, State, Step
from xformer.training.checkpoint import WEIGHTS
from xformer.training.log import LOG, rows
from xformer.training.loop import require_shares
from xformer.training.run import require_alike

SHOWN = 60  # most characters of a text in the suggested command
# Task -> the command that uses its model, by folder and fields of a record. masked has none. printf
# writes the tab of a pair, since a shell would complete one that is pasted.
USES = {
    **dict.fromkeys(("causal", "prefix", "seq2seq"), "xformer generate --model {} --prompt={}"),
    "classify": "xformer classify --model {} -- {}",
    "classify-pairs": r"printf '%s\t%s\n' {1} {2} | xformer classify --model {0} --pairs -",
    "contrastive": "xformer embed --model {} -- {} {}",
    "tag": "xformer tag --model {} -- {}",
    "rank": "xformer rank --model {} -- {} {}",
}
MEASURES = {"accuracy": "accuracy", "f1": "F1"}  # in the log -> in words
NEW_HEADS = {  # task -> the head that a model without one gets
    "classify": "classifier",
    "classify-pairs": "classifier",
    "tag": "token_classifier",
    "rank": "classifier",
}


class Job(NamedTuple):
    """The arguments of `finetune.train`, and of `finetune.run` after its folder."""

    task: Task
    params: Any  # before the first step
    examples: list[Any]
    config: TrainConfig
    backend: Backend
    held_out: list[Any]


class Best(NamedTuple):
    """The validation loss of the saved model, and its step; 0: it was not validated."""

    loss: float
    step: int
    measures: Mapping[str, float] | None = None  # None: they are in the log


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer finetune`."""
    width, kinds = max(map(len, finetune.TASKS)), finetune.TASKS.items()
    rows = [f"  {name:{width}}  {', '.join(kind.fields)}" for name, kind in kinds]
    parser.description = "\n".join(["Fields of a .jsonl file that each task reads:", *rows])
    add_options(parser, FinetuneOptions)


def run(args: argparse.Namespace) -> int:
    """Train, or resume a run, and save the model with the lowest validation loss."""
    with together() as world:
        options = finetune_options.settled(args)
        with kernels_of(options.backend):  # a resumed run has stored its backend
            return _run(options, world)


def _run(options: FinetuneOptions, world: World) -> int:
    job, first = _job(options)
    optimiser = optimiser_of(job.config, options, world)
    # It may raise, before a folder is made.
    state = training.start(job.params, job.config, optimiser)
    require_shares(job.config, world)
    if world.size > 1:
        told = about_of(*job) | {"shard_optimiser": options.shard_optimiser}
        require_alike(world, job.backend, told, options.checkpoint_every)
    folder = folder_of(options, world, "finetuned")
    noted: Any = {"every": options.checkpoint_every, "keep": options.keep_checkpoints}
    noted |= {"notes": kept(finetune_options.with_paths(options)), "free": ABOUT_ENDS}
    run = finetune.run(folder, *job, base=options.model, world=world, **noted)
    model, words = job.task.model, job.task.tokenizer

    def save(params: Any) -> None:
        how: Any = {"tokenizer": words, "base": options.model}
        world.first(lambda: finetune.save(model, params, folder, **how))

    begun, before = 0, None
    try:
        with run:
            state = run.begin(state, options.resume_step)
            notes = run.notes | {"model": str(Path(options.model).absolute())}
            long_names = {dashed(name): value for name, value in notes.items()}
            world.first(lambda: config_file.write(folder, "finetune", long_names))
            begun = state.step
            job = job._replace(params=state.params)  # if resumed, the first ones are not needed
            _introduce(job, begun, world)
            if not begun:
                before = _measured(job, state.params, world)
            begun_at, n_steps = (state.step, state.seconds), job.config.steps
            settings: Any = {"optimiser": optimiser, "donate": True, "world": world}
            steps = finetune.train(*job._replace(params=state), **settings)
            steps = _noted(steps, folder, state.best_step)
            for step in shown(steps, run, n_steps, begun_at, lambda s: _in_words(s.measures)):
                state = step.state
            best = _best(job, state, save, world)
    except KeyboardInterrupt:  # pressed twice; if in an update, some parameters are updated
        if state.step == begun or world.size > 1:
            raise
        best = Best(state.best, state.best_step)
        if not best.step:
            save(state.params)
    say_why(state, job.config)
    if world.rank == 0:
        _conclude(job, folder, state, best, before)
    if options.task in USES:
        values = (first.fields[name] for name in job.task.fields)
        texts = (" ".join(map(str, v if isinstance(v, list) else [v])).strip() for v in values)
        lines = (text.partition("\n")[0].replace("\t", " ")[:SHOWN] for text in texts)
        quoted = map(shlex.quote, (str(folder), *lines))
        print(f"to use it: {USES[options.task].format(*quoted)}")
    return 0


def _job(options: FinetuneOptions) -> tuple[Job, Record]:
    """The job of the options, and the first text. ValueError if an option or a text is unusable."""
    config = config_of(
        options, betas=(0.9, 0.999) if options.optimiser in ("adam", "adamw") else None
    )
    path = Path(options.model)
    if options.resume is not None and not path.exists():
        raise FileNotFoundError(
            f"the run in {options.resume} began from {path}, which is not there: give --model"
        )
    if is_own(path):
        command = f"xformer train --from {shlex.quote(str(path))}"
        raise ValueError(
            f"{path} was written by xformer train, which trains it further: {command} "
            f"--data {shlex.quote(options.data)}"
        )
    if not options.task:
        options.task = finetune.suited(options.data, options.model)
        print(f"task: {options.task}")
    records = finetune.read(options.data, finetune.TASKS[options.task].fields)
    training, held_out = finetune.split(records, options.validation_fraction, options.seed)
    model, params, words, is_new = _opened(options, records)
    backend = backends.get(options.backend, options.device)  # `_opened` enabled float64 of JAX
    task = _task(options, model, words, is_new)
    read = partial(each, what="tokenising", unit="texts")
    examples = finetune.examples(task, read(training))
    validation = finetune.examples(task, read(held_out)) if held_out else []
    params = _chosen(options, params, is_new)
    return Job(task, params, examples, config, backend, validation), records[0]


def _noted(steps: Iterator[Step], folder: Path, best_step: int) -> Iterator[Step]:
    """Yield the steps. Diverged gets a note that says which model is saved."""
    try:
        for step in steps:
            best_step = step.state.best_step
            yield step
    except Diverged as error:
        note = "no model was validated, so none is saved"
        if best_step:
            note = f"{folder} has the model of step {best_step}, the best validated one"
        elif (folder / WEIGHTS).is_file():
            note = f"{folder} has the model of the last checkpoint, which was not validated"
        error.add_note(note)
        raise


def _best(job: Job, state: State, save: Callable[[Any], Any], world: World) -> Best:
    """The loss of the saved model. A last step that was not validated is, and may be better."""
    best = Best(state.best, state.best_step)
    n_steps, every = job.config.steps, job.config.eval_every
    if state.step == n_steps or state.step % every == 0:
        return best
    with suppress(KeyboardInterrupt) if world.size == 1 else nullcontext():
        loss = _measured(job, state.params, world)
        if loss is not None and loss < best.loss:
            if best.step:  # otherwise the last model is saved
                save(state.params)
            options: Any = {"batch_size": job.config.batch_size}
            args = job.task, state.params, job.held_out, job.backend
            best = Best(loss, state.step, finetune.measure(*args, **options))
    return best


def _in_words(measures: Mapping[str, float] | None) -> list[str]:
    """Text of each measure: "accuracy 0.912"."""
    return [f"{MEASURES[name]} {value:.3f}" for name, value in (measures or {}).items()]


def _conclude(job: Job, folder: Path, state: State, best: Best, before: float | None) -> None:
    """Print the validation loss, where the model is saved, and how to resume."""
    if best.loss < math.inf:
        was = "" if before is None else f", {before:.3f} before training"
        which = "" if best.step == state.step else f"; the best model is from step {best.step}"
        found = best.measures
        if found is None:
            row = next((row for row in rows(folder / LOG) if row["step"] == best.step), {})
            found = {name: row[name] for name in MEASURES if name in row}
        measures = "".join(f", {text}" for text in _in_words(found))
        print(f"validation loss {best.loss:.3f} nats{was}{measures}{which}")
    print(f"saved to {folder} after {state.step} steps, {state.seconds:.0f} s")
    if lora.adapters(job.params):
        if peft.others(job.params):
            print("parameters beside the adapters were trained: only the merged model is saved")
        else:
            print(f"the adapter alone: {folder / ADAPTER}")
    print(f"to resume: {how_to_resume('finetune', folder, state, job.config)}")


def _opened(args: FinetuneOptions, records: Sequence[Record]) -> tuple[Any, Any, Any, bool]:
    """The model, its parameters, its tokenizer, and whether its head is new."""
    words: Any  # a tokenizer with more methods than `Codec`
    model, params, words, *_ = opened(args)
    if model.hf_config["model_type"] == "llama2.c":
        model, params = as_llama(model, params)
    head = NEW_HEADS.get(args.task)
    if head is None or finetune.is_classifier(model, head):
        return model, params, words, False
    pad_id = words.eos_id if words.pad_id is None else words.pad_id
    names = None if args.task == "rank" else finetune.labels_in(records)
    options: Any = {"head": head, "seed": args.seed, "pad_id": pad_id}
    new = finetune.with_classifier(model, params, names, **options)
    return *new, words, True


def _task(args: FinetuneOptions, model: Any, words: Any, is_new: bool) -> Task:
    """The task of the options, with the settings of the model's folder. is_new: its head is new."""
    options: dict[str, Any] = {}
    if args.task == "contrastive" and Path(args.model).is_dir():
        saved = settings(args.model)
        if saved.modules:
            raise ValueError(f"{args.model} has Dense modules, which are not trained")
        names = ("pooling", "prompt", "include_prompt")
        options = {name: getattr(saved, name) for name in names}
    if args.task == "rank" and not is_new and Path(args.model).is_dir():
        options["prompt"] = rank_settings(args.model).prompt
    return finetune.task(args.task, model, words, args.max_len, **options)


def _chosen(args: FinetuneOptions, params: Any, is_new: bool) -> Any:
    """The parameters with adapters and frozen leaves as the options say. A new head is trained."""
    patterns = tuple(args.train)
    if args.lora is not None:
        alpha = 2 * args.lora if args.alpha is None else args.alpha
        params = lora.attach(params, args.lora, alpha, args.targets or None, args.seed)
    elif patterns:
        params = tree.freeze(params)
    if patterns or (is_new and args.lora is not None):
        params = tree.thaw(params, *patterns, *(["head.*"] if is_new else []))
    return tree.freeze(params, *args.freeze) if args.freeze else params


def _introduce(job: Job, step: int, world: World) -> None:
    """Print the model, the device and the data, and the step that a run resumes from."""
    model, params = job.task.model, job.params
    added = sum(_size((node.a, node.b)) for node in lora.adapters(params).values())
    trained = _size(tree.trained(params))
    adapters = f" and {added:,} in adapters" if added else ""
    sizes = f"{_size(params) - added:,} parameters{adapters}; {trained:,} trained"
    print(f"model: {title(model)}, {sizes}")
    print(f"on {job.backend.describe()}{description(world)}")
    counts = [f"{len(part):,}" for part in (job.examples, job.held_out)]
    cut = sum(example.is_cut for example in (*job.examples, *job.held_out))
    note = f"; {cut:,} cut to {job.task.max_len} tokens" if cut else ""
    print(f"examples: {counts[0]} to train on, {counts[1]} to validate on{note}")
    if step:
        print(f"resuming after step {step}", flush=True)


def _size(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in tree.flatten(tree.thaw(params)).values())


def _measured(job: Job, params: Any, world: World) -> float | None:
    """The validation loss; None if there is nothing to validate on."""
    if not job.held_out:
        return None
    with watched("validating", len(job.held_out)) as options:
        options |= {"batch_size": job.config.batch_size, "seed": job.config.seed, "world": world}
        return finetune.evaluate(job.task, params, job.held_out, job.backend, **options)
