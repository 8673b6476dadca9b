"""Options of commands that train in a run: shared definitions, and those that a run has stored."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xformer import backends
from xformer.base.choices import near_path
from xformer.cli.paths import nonempty
from xformer.optim import OPTIMISERS
from xformer.pretrained.config import Config
from xformer.training import State, TrainConfig
from xformer.training.config import NOAM, SCHEDULES
from xformer.training.loop import is_stale
from xformer.training.run import RUN, is_begun, read_run


class Flag(argparse.BooleanOptionalAction):
    """A flag whose form with --no- overrides --config; the usage has the short form alone."""

    def format_usage(self) -> str:
        """The option without its other form, which would make lines too long."""
        return self.option_strings[0]


FLAG: dict[str, Any] = {"action": Flag, "default": None}  # arguments of `add_argument`
# Option -> arguments of `add_argument`. `add_shared` adds the command's default to the help text.
SHARED: dict[str, dict[str, Any]] = {
    "--accumulate": {"type": int, "metavar": "N", "help": "batches a step"},
    "--schedule": {"choices": (*SCHEDULES, NOAM), "help": "of the learning rate"},
    "--warmup": {"type": int, "metavar": "STEPS", "help": "steps of linear warmup"},
    "--optimiser": {"choices": OPTIMISERS, "help": ""},
    "--shard-optimiser": {
        **FLAG,
        "help": "each of several processes keeps a part of the optimiser's state: the same numbers",
    },
    "--weight-decay": {"type": float, "metavar": "X", "help": "applied to weight matrices"},
    "--clip": {"type": float, "metavar": "NORM", "help": "clip the global gradient norm"},
    "--validate-every": {"type": int, "metavar": "STEPS", "help": "steps between validations"},
    "--patience": {
        "type": int,
        "metavar": "N",
        "help": "stop after N validations without a better one; may differ with --resume",
    },
    "--resume": {
        "type": nonempty,
        "metavar": "RUN",
        "help": "resume a run from its newest checkpoint",
    },
    "--resume-step": {
        "type": int,
        "metavar": "STEP",
        "help": "with --resume: resume from the checkpoint of this step",
    },
    "--auto-resume": {
        "action": "store_true",
        "default": None,
        "help": "with --out: resume the run in this folder if there is one, otherwise start it",
    },
    "--checkpoint-every": {"type": int, "metavar": "STEPS", "help": "steps between checkpoints"},
    "--keep-checkpoints": {
        "type": int,
        "metavar": "N",
        "help": "keep the last N checkpoints and the best one",
    },
}
# Options that name the run, if they are not given.
NO_RUN = {"resume": None, "resume_step": None, "auto_resume": False, "out": None}
ENDS = ("steps", "patience")  # options that end a run; they may differ when it is resumed
ABOUT_ENDS = tuple(f"training.{name}" for name in ENDS)  # in a run's `about`
# Fields of `TrainConfig` whose options have other names.
FIELDS = {"batch_size": "batch", "eval_every": "validate_every", "eval_batches": "validate_batches"}
MARKS = {"train": "preset", "finetune": "task"}  # command -> an option that only its runs store


def add_shared(add: Callable[..., Any], name: str, default: str | None = None) -> None:
    """Add an option of `SHARED` by `add`. default: in words, for the help text."""
    text = SHARED[name]["help"]
    if default is not None:
        text = f"{text} (default: {default})" if text else f"default: {default}"
    add(name, **SHARED[name] | {"help": text})


def begun_or_new(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of --auto-resume: with --resume if a run has begun in the folder of --out.

    ValueError without --out, and with --resume.
    """
    if not args.auto_resume:
        return args
    if args.resume is not None:
        raise ValueError("--auto-resume excludes --resume: name the folder with --out")
    if args.out is None:
        raise ValueError("--auto-resume needs --out, the folder of the run")
    if not Path(args.out, RUN).is_file() or not is_begun(args.out):
        return args
    resumed = vars(args) | {"resume": args.out, "out": None}
    if resumed.get("origin") is not None:
        resumed["origin"] = str(Path(args.origin).absolute())  # as it is stored
    return argparse.Namespace(**resumed)


def command_of(folder: Path) -> str | None:
    """The command that resumes the run in a folder; None if there is no run of a command."""
    try:
        notes = read_run(folder).get("notes")
    except (OSError, ValueError):
        return None
    marks = MARKS.items() if isinstance(notes, dict) else ()
    return next((command for command, mark in marks if mark in notes), None)


class Stored(NamedTuple):
    """The options that runs of a command store, so that `--resume` needs no others."""

    command: str
    defaults: Mapping[str, Any]
    types: Mapping[str, type]  # of the options whose default is None
    choices: Mapping[str, Sequence[str]]
    free: Sequence[str]  # may differ when a run is resumed: they do not change what is computed

    def resumed(self, args: argparse.Namespace) -> dict[str, Any]:
        """The stored options of the run of --resume; {} without --resume.

        If the run has not begun, args.out becomes its folder and args.resume None: it starts anew.
        ValueError for given options that a resumed run may not change.
        """
        if args.resume is None:
            if args.resume_step is not None:
                raise ValueError("--resume-step needs --resume")
            return {}
        if args.out is not None:
            raise ValueError("--out names a new folder: it excludes --resume")
        before, specified = self.of_run(args.resume), given(args)
        if args.resume_step is None and not is_begun(args.resume):
            args.out, args.resume = args.resume, None
            return before
        if specified.get("steps", math.inf) < before.get("steps", 0):
            raise ValueError(
                f"--steps: must be at least the {before['steps']} of the run in {args.resume}, "
                f"got {specified['steps']}"
            )
        for name, value in before.items():
            if name not in (*self.free, *ENDS) and specified.get(name, value) != value:
                has, got = _shown(value), _shown(specified[name])
                option = "from" if name == "origin" else dashed(name)
                raise ValueError(f"--{option}: the run in {args.resume} has {has}, got {got}")
        return before

    def kept(self, options: argparse.Namespace) -> dict[str, Any]:
        """The options to store, for `resumed`. Resuming changes only `ENDS` among them."""
        names = self.defaults if options.resume is None else ENDS
        before = {} if options.resume is None else self.of_run(options.resume)
        return before | {name: getattr(options, name) for name in names}

    def of_run(self, folder: str) -> dict[str, Any]:
        """The options that a run has stored. ValueError if they are missing or damaged."""
        try:
            notes = read_run(folder).get("notes")
        except FileNotFoundError as error:
            below = Path("runs", folder)  # where the commands make folders
            near = f"; did you mean {shlex.quote(str(below))}?" if below.is_dir() else ""
            raise FileNotFoundError(f"{error}{near or near_path(Path(folder))}") from error
        if isinstance(notes, dict):
            command = command_of(Path(folder))
            if command not in (None, self.command):
                way = f"xformer {command} --resume {shlex.quote(folder)}"
                raise ValueError(f"{folder} is a run of xformer {command}: {way}")
        if not isinstance(notes, dict) or notes.keys() != self.defaults.keys():
            raise ValueError(
                f"{folder} is not a run of xformer {self.command}: resume it from Python"
            )
        usual = self.defaults.items()
        types = {name: type(value) for name, value in usual if value is not None} | {**self.types}
        choices = {"backend": backends.names()} | {**self.choices}
        c = Config(notes, f"{Path(folder, RUN)}: notes")
        read: dict[type, Callable[..., Any]] = {
            int: partial(c.integer, high=1 << 64), float: c.number, bool: c.flag, str: c.text,
            tuple: c.texts,
        }  # fmt: skip
        return {
            name: read[types[name]](
                name,
                **({"null": None} if default is None else {}),
                **({"choices": choices[name]} if name in choices else {}),
            )
            for name, default in usual
        }


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by name. Lists become tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if value is not None
    }


def _shown(value: Any) -> Any:
    return (" ".join(value) or None) if isinstance(value, tuple) else value


@contextmanager
def by_option() -> Iterator[None]:
    """A context in which errors of `TrainConfig` name the option instead of the field."""
    try:
        yield
    except ValueError as error:
        name, _, what = str(error).removeprefix("TrainConfig: ").partition(" ")
        raise ValueError(f"--{dashed(FIELDS.get(name, name))} {what}") from error


def how_to_resume(command: str, folder: Path, state: State, config: TrainConfig) -> str:
    """The command that trains a run further."""
    ends = f" --steps {2 * state.step}" if state.step == config.steps else ""
    if is_stale(state, config):
        ends += f" --patience {2 * state.stale}"
    return f"xformer {command} --resume {shlex.quote(str(folder))}{ends}"


def dashed(name: str) -> str:
    """The name of an option, without its first dashes."""
    return name.replace("_", "-")
