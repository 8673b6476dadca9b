"""The options of `xformer finetune`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from xformer import finetune
from xformer.cli.config_file import add_config
from xformer.cli.paths import BACKEND, DEVICE, TOKENIZER, nonempty
from xformer.cli.run_options import (
    NO_RUN,
    Stored,
    add_shared,
    begun_or_new,
    by_option,
    dashed,
    given,
)
from xformer.dispatch.checks import require_sizes
from xformer.finetune import TrainConfig, lora

RATES = {True: 5e-4, False: 5e-5}  # learning rates, with and without LoRA
DTYPES = ("float32", "float64")
DEFAULTS: dict[str, Any] = {
    "model": None,
    "data": None,
    "task": None,
    "tokenizer": None,
    "lora": None,
    "alpha": None,
    "targets": (),
    "freeze": (),
    "train": (),
    "steps": 200,
    "batch": 8,
    "accumulate": 1,
    "optimiser": "adamw",
    "shard_optimiser": False,
    "lr": None,
    "schedule": "cosine",
    "warmup": None,
    "weight_decay": 0.0,
    "clip": 1.0,
    "max_len": None,
    "validation_fraction": 0.1,
    "validate_every": None,
    "patience": None,
    "seed": 0,
    "backend": "numpy",
    "device": None,
    "dtype": "float32",
    "checkpoint_every": 100,
    "keep_checkpoints": 2,
}
OPTIONS = Stored(
    "finetune",
    DEFAULTS,
    types={
        **dict.fromkeys(("model", "data", "task", "tokenizer", "device"), str),
        **dict.fromkeys(("lora", "warmup", "max_len", "validate_every", "patience"), int),
        **dict.fromkeys(("alpha", "lr"), float),
    },
    choices={"task": [*finetune.TASKS], "dtype": DTYPES},
    # The run compares the parameters of the model and the tokens of the data.
    free=(
        *("model", "data", "tokenizer", "backend", "device"),
        *("shard_optimiser", "checkpoint_every", "keep_checkpoints"),
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options. The value of an option that is not given is None."""
    _add_data(parser)
    _add_model(parser)
    _add_training(parser)
    _add_run(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("text").add_argument
    what = "a .jsonl, .json, .csv or .tsv file, or a text file with one text a line"
    add("--data", metavar="FILE", type=nonempty, help=what)
    tasks = f"{', '.join(finetune.TASKS)} (default: chosen by the fields and the model)"
    add("--task", metavar="TASK", choices=finetune.TASKS, help=tasks)
    add("--max-len", type=int, metavar="N", help="cut texts to N tokens (default: at most 512)")
    held_out = "fraction of the data to validate on (default: 0.1; 0: no validation)"
    add("--validation-fraction", type=float, metavar="FRACTION", help=held_out)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    what = "a Hugging Face folder with its tokenizer"
    add("--model", metavar="FOLDER", type=nonempty, help=what)
    add("--tokenizer", metavar="PATH", type=nonempty, help=TOKENIZER)
    add("--lora", metavar="RANK", type=int, help="train LoRA adapters of this rank")
    add("--alpha", type=float, help="scale of the LoRA adapters (default: twice the rank)")
    patterns: dict[str, Any] = {"metavar": "PATTERN", "nargs": "+"}
    usual = f"the maps of queries and values, such as {' '.join(lora.TARGETS[:2])}"
    add("--targets", **patterns, help=f"linear layers that get an adapter (default: {usual})")
    add(
        "--freeze",
        **patterns,
        help="parameters not to train, by the names of xformer summary --verbose",
    )
    add("--train", **patterns, help="train only these parameters, and adapters")
    add("--backend", **BACKEND)
    add("--device", help=DEVICE)
    add("--dtype", choices=DTYPES, help="default: float32")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    steps = "steps in all (default: 200); may be larger with --resume"
    add("--steps", type=int, help=steps)
    add("--batch", type=int, metavar="N", help="texts or pairs in a batch (default: 8)")
    add_shared(add, "--accumulate", "1")
    lr = f"peak learning rate (default: {RATES[False]}; with --lora {RATES[True]})"
    add("--lr", type=float, help=lr)
    add_shared(add, "--schedule", "cosine")
    add_shared(add, "--warmup", "a tenth of the steps")
    add_shared(add, "--optimiser", "adamw")
    add_shared(add, "--shard-optimiser")
    add_shared(add, "--weight-decay", "0")
    add_shared(add, "--clip", "1; 0: no clipping")
    add_shared(add, "--validate-every", "a quarter of the steps, at least 100")
    add_shared(add, "--patience")
    add("--seed", type=int, help="default: 0")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    out = "a new folder (default: runs/finetuned, -2, -3, ...)"
    add("--out", metavar="DIR", type=nonempty, help=out)
    add_shared(add, "--resume")
    add_shared(add, "--auto-resume")
    add_config(add)
    add_shared(add, "--resume-step")
    add_shared(add, "--checkpoint-every", "100")
    add_shared(add, "--keep-checkpoints", "2")


def settled(args: argparse.Namespace, every: int) -> argparse.Namespace:
    """Every option: as given, else of the resumed run, else the default.

    every: the least number of steps between validations by default
    ValueError for impossible options, and for options that a resumed run may not change.
    """
    if args.resume is not None and args.config is not None:
        raise ValueError("--config starts a new run: it excludes --resume, which has its options")
    args = begun_or_new(args)
    before, specified = OPTIONS.resumed(args), given(args)
    values = DEFAULTS | NO_RUN | before | specified
    options = argparse.Namespace(**values)
    for name in ("model", "data"):
        if getattr(options, name) is None:
            raise ValueError(f"--{name} must be given, or --resume")
    if options.lora is None and (options.alpha is not None or options.targets):
        raise ValueError("--alpha and --targets need --lora")
    if options.lr is None:
        options.lr = RATES[options.lora is not None]
    if options.warmup is None:
        options.warmup = max(1, options.steps // 10)
    if options.validate_every is None:
        options.validate_every = max(every, options.steps // 4)
    for name in ("checkpoint_every", "keep_checkpoints"):
        require_sizes("finetune", 1, **{f"--{dashed(name)}": getattr(options, name)})
    return options


def kept(options: argparse.Namespace) -> dict[str, Any]:
    """The options to store in the run. --model stays as given: an adapter names its base by it."""
    files = {name: getattr(options, name) for name in ("data", "tokenizer")}
    paths = {name: str(Path(path).absolute()) for name, path in files.items() if path is not None}
    return OPTIONS.kept(argparse.Namespace(**vars(options) | paths))


def by_long_name(notes: dict[str, Any], model: str) -> dict[str, Any]:
    """The options of `kept` by their long names, with the absolute path of the model in use."""
    options = notes | {"model": str(Path(model).absolute())}
    return {dashed(name): options[name] for name in DEFAULTS}


def config_of(options: argparse.Namespace) -> TrainConfig:
    """The configuration of training by the options. ValueError names an impossible option."""
    with by_option():
        return TrainConfig(
            steps=options.steps,
            batch_size=options.batch,
            accumulate=options.accumulate,
            optimiser=options.optimiser,
            lr=options.lr,
            schedule=options.schedule,
            warmup=options.warmup,
            betas=(0.9, 0.999) if options.optimiser in ("adam", "adamw") else None,
            weight_decay=options.weight_decay,
            clip=options.clip or None,
            eval_every=options.validate_every,
            patience=options.patience,
            seed=options.seed,
        )
