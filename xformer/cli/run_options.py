"""Options of the commands that train in a run: fields of a dataclass, which the run stores."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from xformer.base.choices import near_path
from xformer.cli.paths import BACKEND, DEVICE, nonempty
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import FLOATING
from xformer.optim import OPTIMISERS
from xformer.training import State, TrainConfig
from xformer.training.config import NOAM, SCHEDULES
from xformer.training.loop import is_stale
from xformer.training.run import RUN, is_begun, read_run

GROUPS = ("text", "model", "computation", "training", "run")  # titles in the help
ENDS = ("steps", "patience")  # options that end a run; they may differ when it is resumed
ABOUT_ENDS = tuple(f"training.{name}" for name in ENDS)  # in a run's `about`
# Fields of `TrainConfig` whose options have other names.
FIELDS = {"batch_size": "batch", "eval_every": "validate_every", "eval_batches": "validate_batches"}
MARKS = {"train": "preset", "finetune": "task"}  # command -> an option that only its runs store


class Flag(argparse.BooleanOptionalAction):
    """A flag whose form with --no- overrides --config; the usage has the short form alone."""

    def format_usage(self) -> str:
        """The option without its other form, which would make lines too long."""
        return self.option_strings[0]


PathName = str  # of a file or a folder
# Annotation of a field, without None -> type of its values, how messages call this type, arguments
# of `add_argument`.
KINDS: dict[str, tuple[type, str, dict[str, Any]]] = {
    "bool": (bool, "true or false", {"action": Flag}),
    "int": (int, "an integer", {"type": int, "metavar": "N"}),
    "float": (float, "a number", {"type": float, "metavar": "X"}),
    "str": (str, "a string", {}),
    "PathName": (str, "a string", {"type": nonempty, "metavar": "PATH"}),
    "tuple[str, ...]": (tuple, "a list of strings", {"nargs": "+", "metavar": "PATTERN"}),
}


def option(
    group: str,
    default: Any,
    what: str = "",
    usual: str | None = None,
    *,
    free: bool = False,
    least: int | None = None,
    stored: bool = True,
    **arguments: Any,
) -> Any:
    """A field of a dataclass of options.

    group: one of `GROUPS`
    what: what the help says, without the default
    usual: the default in words (default: `default`, or nothing if that is None, a flag or a list)
    free: whether the option may differ when a run is resumed: it does not change what is computed
    least: the least integer
    stored: whether a run stores the option
    arguments: of `add_argument`, beside those in `KINDS`
    """
    if usual is None and default is not None and not isinstance(default, bool | tuple):
        usual = f"{default:g}" if isinstance(default, float) else str(default)
    if usual:
        what = f"{what} (default: {usual})" if what else f"default: {usual}"
    metadata = {"group": group, "free": free, "least": least, "stored": stored}
    metadata["arguments"] = {"help": what} | arguments
    return dataclasses.field(default=default, metadata=metadata)


# A field in each group.
in_text, in_model, in_computation, in_training, in_run = (partial(option, g) for g in GROUPS)


@dataclass(kw_only=True)
class RunOptions:
    """The options of each command that trains in a run. ValueError for an integer too low.

    A command has its own defaults of the options that have none here, and more options.
    """

    command: ClassVar[str]

    backend: str = in_computation("numpy", free=True, usual="", **BACKEND)
    device: str | None = in_computation(None, DEVICE, free=True)
    dtype: str = in_computation("float32", choices=FLOATING)

    steps: int
    batch: int
    accumulate: int = in_training(1, "batches a step")
    lr: float | None
    schedule: str = in_training("cosine", "of the learning rate", choices=(*SCHEDULES, NOAM))
    warmup: int | None = in_training(50, "steps of linear warmup")
    optimiser: str = in_training("adamw", choices=OPTIMISERS)
    shard_optimiser: bool = in_training(
        False, "each process keeps a part of the optimiser's state: the same numbers", free=True
    )
    weight_decay: float | None = in_training(
        None, "applied to weight matrices", "0.1; 0 for adam and sgd"
    )
    clip: float = in_training(1.0, "clip the global gradient norm", "1; 0: no clipping")
    validate_every: int | None = in_training(100, "steps between validations")
    patience: int | None = in_training(
        None, "stop after N validations without a better one; may differ with --resume"
    )
    seed: int = in_training(0)

    out: PathName | None
    resume: PathName | None = in_run(
        None, "resume a run from its newest checkpoint", stored=False, metavar="RUN"
    )
    resume_step: int | None = in_run(
        None, "with --resume: resume from the checkpoint of this step", stored=False
    )
    auto_resume: bool = in_run(
        False,
        "with --out: resume the run in this folder if there is one, otherwise start it",
        stored=False,
    )
    config: PathName | None = in_run(
        None,
        "options in a TOML file, by their long names and without tables: d-model = 128; the "
        "command line wins; a run writes its own, config.toml",
        stored=False,
    )
    checkpoint_every: int = in_run(100, "steps between checkpoints", free=True, least=1)
    keep_checkpoints: int = in_run(
        2, "keep the last N checkpoints and the best one", free=True, least=1
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), field.metadata["least"]
            if value is not None and least is not None:
                require_sizes(self.command, least, **{f"--{dashed(field.name)}": value})


Command = type[RunOptions]


def add_options(parser: argparse.ArgumentParser, command: Command) -> None:
    """Add all options of a command. The value of an option that is not given is None."""
    parser.set_defaults(options=command)
    fields = dataclasses.fields(command)
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for field in sorted(fields, key=lambda field: GROUPS.index(field.metadata["group"])):
        settings: dict[str, Any] = {"dest": field.name, "default": None} | _kind(field)[2]
        settings |= field.metadata["arguments"]
        groups[field.metadata["group"]].add_argument(f"--{dashed(field.name)}", **settings)


def checked(field: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """The value of an option, of a file. ValueError, which begins with `where`, if it is another's.

    Integers are numbers; None is a value if it is the default.
    """
    kind, words, arguments = _kind(field)
    choices = field.metadata["arguments"].get("choices")
    if value is None and field.default is None:
        return None
    if kind is float and type(value) is int and abs(value) < 1 << 1023:
        value = float(value)
    if kind is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if type(value) is not kind:
        raise ValueError(f"{where} must be {words}, got {value!r:.60}")
    if choices is not None and value not in choices:
        raise ValueError(f"{where} must be one of {', '.join(choices)}, got {value!r:.60}")
    try:
        return arguments.get("type", kind)(value)
    except argparse.ArgumentTypeError as error:  # of `nonempty`
        raise ValueError(f"{where} {error}") from error


def _kind(field: dataclasses.Field[Any]) -> tuple[type, str, dict[str, Any]]:
    return KINDS[str(field.type).removesuffix(" | None")]


def stored(command: Command) -> dict[str, dataclasses.Field[Any]]:
    """The options that runs of a command store, so that `--resume` needs no others, by name."""
    return {field.name: field for field in dataclasses.fields(command) if field.metadata["stored"]}


def stored_and_given(
    command: Command, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that the run of --resume has stored, and the options that were given, by name.

    The first are {} without --resume. If the run has not begun, it starts anew: --out, and not
    --resume, is its folder. With --auto-resume, --resume is --out if a run has begun in it.
    ValueError for given options that a resumed run may not change.
    """
    given: dict[str, Any] = {
        field.name: tuple(value) if isinstance(value, list) else value
        for field in dataclasses.fields(command)
        if (value := getattr(args, field.name)) is not None
    }
    for name in ("config", "origin"):
        if "resume" in given and name in given:
            raise ValueError(
                f"--{dashed(name)} starts a new run: it excludes --resume, which has its options"
            )
    if given.get("auto_resume"):
        _find_run(given)
    folder = given.get("resume")
    if folder is None:
        if "resume_step" in given:
            raise ValueError("--resume-step needs --resume")
        return {}, given
    if "out" in given:
        raise ValueError("--out names a new folder: it excludes --resume")
    before = options_in(folder, command)
    if "resume_step" not in given and not is_begun(folder):
        given["out"] = given.pop("resume")
        return before, given
    if given.get("steps", math.inf) < before["steps"]:
        raise ValueError(
            f"--steps: must be at least the {before['steps']} of the run in {folder}, "
            f"got {given['steps']}"
        )
    for name, field in stored(command).items():
        is_fixed = not field.metadata["free"] and name not in ENDS
        if is_fixed and given.get(name, before[name]) != before[name]:
            has, got = _shown(before[name]), _shown(given[name])
            raise ValueError(f"--{dashed(name)}: the run in {folder} has {has}, got {got}")
    return before, given


def _find_run(given: dict[str, Any]) -> None:
    """For --auto-resume: put --resume in place of --out if a run has begun in that folder.

    ValueError without --out, and with --resume.
    """
    if "resume" in given:
        raise ValueError("--auto-resume excludes --resume: name the folder with --out")
    if "out" not in given:
        raise ValueError("--auto-resume needs --out, the folder of the run")
    if Path(given["out"], RUN).is_file() and is_begun(given["out"]):
        given["resume"] = given.pop("out")
        if "origin" in given:
            given["origin"] = str(Path(given["origin"]).absolute())  # as it is stored


def kept(options: RunOptions) -> dict[str, Any]:
    """The options to store, for `stored_and_given`. Resuming changes only `ENDS` among them."""
    values = {name: getattr(options, name) for name in stored(type(options))}
    if options.resume is None:
        return values
    before = options_in(options.resume, type(options))
    return before | {name: values[name] for name in ENDS}


def options_in(folder: str, command: Command) -> dict[str, Any]:
    """The options that a run has stored. ValueError if they are missing or damaged."""
    try:
        notes = read_run(folder).get("notes")
    except FileNotFoundError as error:
        below = Path("runs", folder)  # where the commands make folders
        near = f"; did you mean {shlex.quote(str(below))}?" if below.is_dir() else ""
        raise FileNotFoundError(f"{error}{near or near_path(Path(folder))}") from error
    if isinstance(notes, dict):
        other = command_of(Path(folder))
        if other not in (None, command.command):
            way = f"xformer {other} --resume {shlex.quote(folder)}"
            raise ValueError(f"{folder} is a run of xformer {other}: {way}")
    fields = stored(command)
    if not isinstance(notes, dict) or notes.keys() != fields.keys():
        raise ValueError(
            f"{folder} is not a run of xformer {command.command}: resume it from Python"
        )
    where = f"{Path(folder, RUN)}: notes"
    return {name: checked(fields[name], notes[name], f"{where}: {name}") for name in fields}


def command_of(folder: Path) -> str | None:
    """The command that resumes the run in a folder; None if there is no run of a command."""
    try:
        notes = read_run(folder).get("notes")
    except (OSError, ValueError):
        return None
    marks = MARKS.items() if isinstance(notes, dict) else ()
    return next((command for command, mark in marks if mark in notes), None)


def config_of(options: RunOptions, **others: Any) -> TrainConfig:
    """The configuration of training by the options. ValueError names an impossible option.

    others: fields of `TrainConfig` that no option sets
    """
    names = {f.name: FIELDS.get(f.name, f.name) for f in dataclasses.fields(TrainConfig)}
    values = {f: getattr(options, name) for f, name in names.items() if hasattr(options, name)}
    try:
        return TrainConfig(**values | {"clip": options.clip or None} | others)
    except ValueError as error:
        name, _, what = str(error).removeprefix("TrainConfig: ").partition(" ")
        raise ValueError(f"--{dashed(names.get(name, name))} {what}") from error


def how_to_resume(command: str, folder: Path, state: State, config: TrainConfig) -> str:
    """The command that trains a run further."""
    ends = f" --steps {2 * state.step}" if state.step == config.steps else ""
    if is_stale(state, config):
        ends += f" --patience {2 * state.stale}"
    return f"xformer {command} --resume {shlex.quote(str(folder))}{ends}"


def dashed(name: str) -> str:
    """The long name of an option, without its first dashes."""
    return "from" if name == "origin" else name.replace("_", "-")


def _shown(value: Any) -> Any:
    return (" ".join(value) or None) if isinstance(value, tuple) else value
