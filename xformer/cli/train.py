"""`xformer train`: train a GPT on text, or resume a run, and print a sample of the model."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from xformer.base import tree
from xformer.base.printing import size
from xformer.cli import config_file, train_from, train_options
from xformer.cli.generate import write
from xformer.cli.multiprocess import description, optimiser_of, together
from xformer.cli.open_model import kernels_of, opened
from xformer.cli.parser import Parser
from xformer.cli.progress import WIDTH
from xformer.cli.run_options import (
    ABOUT_ENDS,
    RunOptions,
    add_options,
    command_of,
    how_to_resume,
    kept,
)
from xformer.cli.steps import say_why, shown
from xformer.cli.train_job import Job, job_of
from xformer.cli.train_options import TrainOptions
from xformer.distributed.world import World
from xformer.generation import stream_text
from xformer.generation.samplers import temperature
from xformer.initializers import fixup
from xformer.training import Run, State, Step, dashboard, evaluate, start, train
from xformer.training.loop import is_stale, require_shares
from xformer.training.run import checkpoints, is_free, require_alike

# Of textwrap. Paths stay whole.
WRAPPED: Any = {
    "subsequent_indent": " " * len("data: "),
    "break_long_words": False,
    "break_on_hyphens": False,
}
SAMPLE = 300  # tokens that a run prints at its end


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer train`."""
    parser.after = train_options.presets
    add_options(parser, TrainOptions)


def run(args: argparse.Namespace) -> int:
    """Train, save the best model, and print a sample of it."""
    with together() as world:
        options = train_options.settled(args)
        with kernels_of(options.backend):  # a resumed run has stored its backend
            return _run(options, world)


def _run(options: TrainOptions, world: World) -> int:
    job = job_of(options)
    about = {
        "model": train_from.about_of(job.model),
        "training": dataclasses.asdict(job.config),
        "dtype": options.dtype,
        "data": {"training": job.source.fingerprint(), "validation": job.validation.fingerprint()},
    }
    require_shares(job.config, world, job.loss)
    told = about | {"shard_optimiser": options.shard_optimiser}
    require_alike(world, job.backend, told, options.checkpoint_every)
    folder = folder_of(options, world)
    noted: Any = {"every": options.checkpoint_every, "keep": options.keep_checkpoints}
    noted |= {"notes": kept(options), "free": ABOUT_ENDS}
    with Run(folder, job.backend, about, model=job.model, world=world, **noted) as run:
        words = job.corpus.vocabulary
        world.first(lambda: train_from.save_vocabulary(words, options, folder))
        # The first state gets no name, or it would stay in memory until training ends.
        state = _train(job, run, _begun(job, run, options), options)
    if world.rank == 0:
        _conclude(job, state, folder, options)
    return 0


def _begun(job: Job, run: Run, options: TrainOptions) -> State:
    """The state to start or resume from. Prints the data, the model and the device."""
    world = run.world
    if options.origin is None or world.first(lambda: bool(checkpoints(run.folder))):
        params = job.model.init_from(job.backend.generator(options.seed, options.dtype))
        if options.init == "fixup":
            params = fixup(params, n_branches=2 * len(job.model.blocks))
    else:
        params = opened(train_from.in_folder(str(options.origin), options)).params
    optimiser = optimiser_of(job.config, options, world)
    state = run.begin(start(params, job.config, optimiser, job.loss), options.resume_step)
    long_names = train_options.by_long_name(run.notes)
    world.first(lambda: config_file.write(run.folder, "train", long_names))
    _introduce(job, state, options, world)
    if options.origin is not None and not state.step:
        run.save(state)  # from now on the run does not need the folder of --from
        loss = _measured(job, state, world)
        print(f"validation loss {loss:.3f} nats per {job.unit} before training")
        print(_in_other_units(loss, job.unit), flush=True)
    return state


def _measured(job: Job, state: State, world: World) -> float:
    with job.backend.active():
        weights = job.backend.cast_params(state.averaged, job.config.precision)
    mean_loss = evaluate(job.loss, weights, job.held_out, job.backend, world=world)
    assert mean_loss is not None  # there are --validate-batches of them, at least one
    return mean_loss


def _introduce(job: Job, state: State, options: TrainOptions, world: World) -> None:
    unit = job.unit
    counts = [len(part) for part in job.corpus[:2]]
    sizes = [size(n) if unit == "byte" else f"{n:,} {unit}s" for n in counts]
    n_params = sum(math.prod(leaf.shape) for leaf in tree.flatten(state.params).values())
    print(textwrap.fill(f"data: {job.corpus.description}", WIDTH - 1, **WRAPPED))
    print(f"      {sizes[0]} to train on, {sizes[1]} to validate on")
    name = train_from.name_of(job.model)
    which = f"preset {options.preset}" if options.origin is None else f"from {options.origin}"
    print(f"model: {name}, {which}, {n_params:,} parameters")
    print(f"on {job.backend.describe()}{description(world)}")
    print(f"loss of a unigram model: {job.baseline:.3f} nats per {unit}", flush=True)
    if state.step:
        print(f"resuming after step {state.step}", flush=True)


def _train(job: Job, run: Run, state: State, options: TrainOptions) -> State:
    """Train and return the last state. Ctrl-C ends training early."""
    if state.step == job.config.steps or is_stale(state, job.config):
        return state
    settings: Any = {"held_out": job.held_out, "deterministic": options.deterministic}
    settings |= {"compiled": options.compile, "world": run.world}
    settings["optimiser"] = optimiser_of(job.config, options, run.world)
    steps = train(job.loss, state, job.source, job.config, job.backend, donate=True, **settings)
    begun = (state.step, state.seconds)
    every = None if run.world.rank else options.sample_every
    reporting: AbstractContextManager[Callable[[Step], None]] = nullcontext(lambda step: None)
    if options.log_to != "none" and not run.world.rank:
        notes, again = train_options.by_long_name(run.notes), options.resume_step is not None
        reporting = dashboard(options.log_to, run.folder, notes, again=again)
    with reporting as report:
        for step in shown(steps, run, job.config.steps, begun, _perplexity):
            state = step.state
            report(step)
            if every is not None and step.step % every == 0:
                with tqdm.external_write_mode():
                    print(f"--- step {step.step}")
                    _sample(job, state.averaged, max_new_tokens=100)
    say_why(state, job.config)
    return state


def _perplexity(step: Step) -> list[str]:
    assert step.validation is not None  # it is the step of a validation
    return [f"perplexity {perplexity(step.validation):,.2f}"]


def perplexity(loss: float) -> float:
    """exp(loss), of a mean loss in nats per token; inf if it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _in_other_units(loss: float, unit: str) -> str:
    """A loss as perplexity; for bytes and characters also in bits."""
    bits = "" if unit == "token" else f", {loss / math.log(2):.3f} bits per {unit}"
    return f"perplexity {perplexity(loss):,.2f}{bits}"


def _conclude(job: Job, state: State, folder: Path, options: TrainOptions) -> None:
    """Print the validation loss, how to resume, and a sample of the saved model."""
    print(f"saved to {folder} after {state.step} steps, {state.seconds:.0f} s")
    if state.best_step:
        print(
            f"validation loss {state.best:.3f} nats per {job.unit}, after step "
            f"{state.best_step} (a unigram model: {job.baseline:.3f})"
        )
        print(_in_other_units(state.best, job.unit))
    print(f"to resume: {how_to_resume('train', folder, state, job.config)}")
    print(f"\na sample, continuing {job.prompt!r}:\n")
    _sample(job, opened(train_from.in_folder(folder, options)).params, max_new_tokens=SAMPLE)
    more = f"--model {shlex.quote(str(folder))} --prompt={shlex.quote(job.prompt)}"
    print(f"\nto generate more: xformer generate {more}")


def _sample(job: Job, params: Any, max_new_tokens: int) -> None:
    options: Any = {"sampler": temperature(0.8), "seed": job.config.seed, "sliding_context": True}
    words = job.corpus.vocabulary
    with job.backend.active():
        weights = job.backend.cast_params(params, job.config.precision)
    write(
        stream_text(
            job.model, weights, words, job.prompt, max_new_tokens=max_new_tokens, **options
        ),
        job.prompt,
    )


def folder_of(options: RunOptions, world: World, name: str = "gpt") -> Path:
    """The folder of the run: of --resume, else a new one, which process 0 makes (`new_folder`).

    The folder of --auto-resume may exist: `Run` refuses one with other files.
    """
    if options.resume:
        return Path(options.resume)
    if options.auto_resume and options.out:
        return Path(options.out)
    made: Path = world.first(lambda: new_folder(options.out, name))
    return made


def new_folder(out: str | None, name: str = "gpt") -> Path:
    """Make and return a folder for a run: `out`, or runs/`name`, runs/`name`-2, ...

    FileExistsError if `out` is a file or in use (`is_free`); OSError if it cannot be made.
    """
    if out is not None:
        folder = Path(out)
        if os.path.lexists(folder) and not folder.is_dir():
            raise FileExistsError(f"--out: {folder} is a file; name a new folder")
        if folder.exists() and not is_free(folder):
            command = command_of(folder)
            resume = f"xformer {command} --resume {shlex.quote(str(folder))}"
            or_resume = f", or resume the run in it: {resume}" if command else ""
            raise FileExistsError(f"--out: {folder} is not empty; name a new folder{or_resume}")
    else:
        names = [name, *(f"{name}-{i}" for i in range(2, 10_000))]
        folder = next(p for p in (Path("runs", n) for n in names) if not p.exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{folder} cannot be made: {error.strerror}") from error
    return folder
