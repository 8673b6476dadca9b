"""The options of `xformer train`, and those of a run that goes on."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xformer import backends
from xformer.checks import require_sizes
from xformer.cli import train_from
from xformer.cli.paths import nonempty
from xformer.optim import OPTIMISERS
from xformer.pretrained.config import Config
from xformer.renamed import fields
from xformer.shapes import STORED
from xformer.training import TrainConfig
from xformer.training.config import NOAM, SCHEDULES
from xformer.training.run import RUN, read_run


class Preset(NamedTuple):
    """Sizes of a model and of its training."""

    layers: int
    d_model: int
    heads: int
    max_len: int
    batch: int
    steps: int
    lr: float


PRESETS = {
    "tiny": Preset(2, 64, 2, 64, 16, 200, 5e-3),
    "small": Preset(4, 128, 4, 128, 8, 1500, 4e-3),
    "medium": Preset(6, 384, 6, 256, 12, 3000, 1e-3),
}
# What holds unless it is given, beside what the preset says.
DEFAULTS: dict[str, Any] = {
    "origin": None,
    "data": None,
    "tokenizer": None,
    "preset": "small",
    "dropout": 0.0,
    "accumulate": 1,
    "optimiser": "adamw",
    "schedule": "cosine",
    "warmup": 50,
    "weight_decay": None,
    "clip": 1.0,
    "ema": None,
    "validate_every": 100,
    "validate_batches": 8,
    "patience": None,
    "seed": 0,
    "dtype": "float32",
    "precision": None,
    "backend": "numpy",
    "device": None,
    "activation_checkpointing": False,
    "deterministic": False,
    "compile": None,
    "checkpoint_every": 100,
    "keep_checkpoints": 2,
    "sample_every": None,
}
# Of which older runs have no note; they went by the usual value.
ADDED = ("origin", "precision", "deterministic", "compile")
# Of what has no usual value, its type.
TYPES: dict[str, type] = {
    **dict.fromkeys(("origin", "data", "tokenizer", "device", "precision"), str),
    **dict.fromkeys(("weight_decay", "ema"), float),
    **dict.fromkeys(("patience", "sample_every"), int),
    "compile": bool,
}
# Fields of `TrainConfig` whose options have other names.
FIELDS = {"batch_size": "batch", "eval_every": "validate_every", "eval_batches": "validate_batches"}
DTYPES = ("float32", "float64")
# What may be another when a run goes on: where and how often, but not what is computed.
FREE = (
    *("data", "backend", "device", "activation_checkpointing", "deterministic", "compile"),
    *("checkpoint_every", "keep_checkpoints", "sample_every"),
)
# What the model of --from has.
OWN = ("tokenizer", "layers", "d_model", "heads", "dropout")
# What ends a run, and may be another when it goes on.
ENDS = ("steps", "patience")
ABOUT_ENDS = tuple(f"training.{name}" for name in ENDS)  # in a run's `about`


def add_options(parser: argparse.ArgumentParser) -> None:
    """All of them; None stands for what is not given."""
    _add_data(parser)
    _add_model(parser)
    _add_training(parser)
    _add_run(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("text").add_argument
    what = "UTF-8 file, folder of such, .jsonl, or a folder made by xformer prepare"
    add("--data", metavar="PATH", type=nonempty, help=f"{what}; Python's own source unless given")
    kinds = "bytes, characters, bpe:SIZE, or a folder with a tokenizer"
    add("--tokenizer", metavar="NAME", help=f"{kinds} (default: bytes, or the prepared folder's)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--preset", choices=PRESETS, help="sizes, where none are given (default: small)")
    add("--layers", type=int, metavar="N")
    add("--d-model", type=int, metavar="N", help="of the hidden states")
    add("--heads", type=int, metavar="N")
    add("--max-len", type=int, metavar="N", help="tokens that the model sees")
    add("--dropout", type=float, metavar="RATE", help="default: 0")
    add(
        "--activation-checkpointing",
        action="store_true",
        default=None,
        help="keep less for the backward pass, compute it again: the same numbers, less memory",
    )
    add("--backend", choices=backends.NAMES, help="default: numpy")
    add("--device", help="of the backend, such as cuda:1; its default one unless given")
    add("--dtype", choices=DTYPES, help="default: float32")
    stored = "what weights and activations are rounded to, on cupy; the parameters stay float32"
    add("--precision", choices=STORED, help=stored)
    bits = "the same bits each time on a GPU too, which may take longer; on a CPU they always are"
    add("--deterministic", action="store_true", default=None, help=bits)
    compiled = "a step is one call of the library where that can be (default: on backend numba)"
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help=compiled)


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, help="in all; the preset's unless given; with --resume it may grow")
    add("--batch", type=int, metavar="N", help="texts at once; the preset's unless given")
    add("--accumulate", type=int, metavar="N", help="batches in a step (default: 1)")
    lr = "at its peak (default: the preset's; with --from a pretrained model 5e-5)"
    add("--lr", type=float, help=lr)
    add("--schedule", choices=(*SCHEDULES, NOAM), help="default: cosine")
    add("--warmup", type=int, metavar="STEPS", help="default: 50")
    add("--optimiser", choices=OPTIMISERS, help="default: adamw")
    decay = "of matrices (default: 0.1; 0 of adam and sgd, where it is a part of the gradient)"
    add("--weight-decay", type=float, metavar="X", help=decay)
    add("--clip", type=float, metavar="NORM", help="of all gradients (default: 1; 0: none)")
    add("--ema", type=float, metavar="DECAY", help="train as ever, keep a moving average")
    add("--validate-every", type=int, metavar="STEPS", help="default: 100")
    held_out = "of held-out text, spread evenly over it (default: 8)"
    add("--validate-batches", type=int, metavar="N", help=held_out)
    stale = "stop after N validations without a better one; with --resume it may be another"
    add("--patience", type=int, metavar="N", help=stale)
    add("--seed", type=int, help="default: 0")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add(
        "--out",
        metavar="DIR",
        type=nonempty,
        help="a new folder; runs/gpt, gpt-2, ... unless given",
    )
    add(
        "--resume", metavar="RUN", type=nonempty, help="go on with a run from its newest checkpoint"
    )
    start = "begin with this model: a run, or a folder of Hugging Face's format"
    add("--from", dest="origin", metavar="FOLDER", type=nonempty, help=start)
    add(
        "--resume-step",
        type=int,
        metavar="STEP",
        help="with --resume: from the checkpoint of that step",
    )
    add("--checkpoint-every", type=int, metavar="STEPS", help="between checkpoints (default: 100)")
    add(
        "--keep-checkpoints",
        type=int,
        metavar="N",
        help="checkpoints beside the best one (default: 2)",
    )
    add("--sample-every", type=int, metavar="STEPS", help="print what the model writes by then")


def settled(args: argparse.Namespace) -> argparse.Namespace:
    """Every option: as given, as the run to resume has it, by the preset, or as usual.

    ValueError for options that a run cannot change when it goes on, and for impossible ones.
    """
    if args.resume is None:
        if args.resume_step is not None:
            raise ValueError("--resume-step goes with --resume")
        before: dict[str, Any] = {}
    elif args.origin is not None:
        raise ValueError("--from begins a new run, and goes without --resume")
    else:
        if args.out is not None:
            raise ValueError("--out names a new folder, and goes without --resume")
        before = _of_run(args.resume)
    given = {name: value for name, value in vars(args).items() if value is not None}
    if given.get("steps", math.inf) < before.get("steps", 0):
        raise ValueError(
            f"--steps: the run in {args.resume} has {before['steps']}, and may have more, "
            f"got {given['steps']}"
        )
    for name, value in before.items():
        if name not in (*FREE, *ENDS) and given.get(name, value) != value:
            raise ValueError(
                f"--{_dashed(name)}: the run in {args.resume} has {value}, got {given[name]}"
            )
    if args.origin is not None:
        before = _of_origin(args.origin, given)
    options = DEFAULTS | {"resume": None, "resume_step": None, "out": None} | before | given
    sizes = PRESETS[options["preset"]]._asdict()
    options = sizes | options
    if options["precision"] is not None and options["dtype"] != "float32":
        raise ValueError(f"--precision goes with --dtype float32, got {options['dtype']}")
    for name in ("data", "origin"):
        if options[name] is not None:
            options[name] = str(Path(options[name]).absolute())
    for name in ("max_len", "checkpoint_every", "keep_checkpoints", "sample_every"):
        if options[name] is not None:
            require_sizes("train", 1, **{f"--{_dashed(name)}": options[name]})
    return argparse.Namespace(**options)


def kept(options: argparse.Namespace) -> dict[str, Any]:
    """What a run notes of them, for `settled`: when it goes on, no other but what ends it."""
    names = (*DEFAULTS, *Preset._fields) if options.resume is None else ENDS
    before = {} if options.resume is None else _of_run(options.resume)
    return before | {name: getattr(options, name) for name in names}


def config_of(options: argparse.Namespace) -> TrainConfig:
    """What they say of training. ValueError that names the option which is impossible."""
    with by_option():
        return TrainConfig(
            steps=options.steps,
            batch_size=options.batch,
            accumulate=options.accumulate,
            optimiser=options.optimiser,
            lr=options.lr,
            schedule=options.schedule,
            warmup=options.warmup,
            weight_decay=options.weight_decay,
            clip=options.clip or None,
            ema=options.ema,
            eval_every=options.validate_every,
            eval_batches=options.validate_batches,
            patience=options.patience,
            seed=options.seed,
            precision=options.precision,
        )


@contextmanager
def by_option() -> Iterator[None]:
    """Errors of `TrainConfig` name the option in the place of its field."""
    try:
        yield
    except ValueError as error:
        name, _, what = str(error).removeprefix("TrainConfig: ").partition(" ")
        raise ValueError(f"--{_dashed(FIELDS.get(name, name))} {what}") from error


def _of_origin(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options that follow from the model of --from. ValueError for those that it has."""
    for name in OWN:
        if name in given:
            raise ValueError(f"--{name} goes without --from: the model in {folder} has its own")
    found = train_from.usual(folder)
    if given.get("max_len", 0) > found.most:
        raise ValueError(
            f"--max-len must be at most the {found.most} of the model in {folder}, "
            f"got {given['max_len']}"
        )
    return found.options


def _of_run(folder: str) -> dict[str, Any]:
    """The options of a run, each of its type. ValueError where they are none, or damaged."""
    found = read_run(folder).get("notes")
    names = {*DEFAULTS, *Preset._fields}
    if isinstance(found, dict):
        found = {name: DEFAULTS[name] for name in ADDED} | fields("notes", found)
    if not isinstance(found, dict) or found.keys() != names:
        raise ValueError(f"{folder} is not a run of xformer train, and goes on from Python only")
    usual = PRESETS["small"]._asdict() | DEFAULTS
    types = {name: type(value) for name, value in usual.items() if value is not None} | TYPES
    choices = {"preset": [*PRESETS], "dtype": DTYPES, "backend": backends.NAMES}
    choices |= {"precision": STORED}
    c = Config(found, f"{Path(folder, RUN)}: notes")
    read: dict[type, Callable[..., Any]] = {
        int: partial(c.integer, high=1 << 64), float: c.number, bool: c.flag, str: c.text
    }  # fmt: skip
    return {
        name: read[types[name]](
            name,
            **({"null": None} if usual[name] is None else {}),
            **({"choices": choices[name]} if name in choices else {}),
        )
        for name in names
    }


def _dashed(name: str) -> str:
    return name.replace("_", "-")
