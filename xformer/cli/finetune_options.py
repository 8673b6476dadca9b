"""The options of `xformer finetune`."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer import finetune
from xformer.cli.paths import TOKENIZER
from xformer.cli.run_options import (
    PathName,
    RunOptions,
    in_model,
    in_run,
    in_text,
    in_training,
    stored_and_given,
)
from xformer.finetune.lora import TARGETS

RATES = {True: 5e-4, False: 5e-5}  # learning rates, with and without LoRA
EVERY = 100  # least number of steps between validations by default; there are at most four


@dataclass(kw_only=True)
class FinetuneOptions(RunOptions):
    """The options of `xformer finetune`. The run compares the parameters and the tokens.

    --model and --data must be given, and `task` is found from them if it is not given.
    """

    command = "finetune"

    data: PathName = in_text(
        None, "a .jsonl, .json, .csv or .tsv file, or a text file with one text a line", free=True
    )
    task: str = in_text(
        None,
        ", ".join(finetune.TASKS),
        "chosen by the fields and the model",
        metavar="TASK",
        choices=finetune.TASKS,
    )
    max_len: int | None = in_text(None, "cut texts to N tokens", "at most 512")
    validation_fraction: float = in_text(
        0.1, "fraction of the data to validate on", "0.1; 0: no validation"
    )

    model: PathName = in_model(
        None, "a Hugging Face folder with its tokenizer", free=True, metavar="FOLDER"
    )
    tokenizer: PathName | None = in_model(None, TOKENIZER, free=True)
    lora: int | None = in_model(None, "train LoRA adapters of rank N")
    alpha: float | None = in_model(None, "scale of the LoRA adapters", "twice the rank")
    targets: tuple[str, ...] = in_model(
        (),
        "linear layers that get an adapter",
        f"the maps of queries and values, such as {' '.join(TARGETS[:2])}",
    )
    freeze: tuple[str, ...] = in_model(
        (), "parameters not to train, by the names of xformer summary --verbose"
    )
    train: tuple[str, ...] = in_model((), "train only these parameters, and adapters")

    steps: int = in_training(200, "steps in all; may be larger with --resume")
    batch: int = in_training(8, "texts or pairs in a batch")
    lr: float | None = in_training(
        None, "peak learning rate", f"{RATES[False]}; with --lora {RATES[True]}"
    )
    warmup: int | None = in_training(None, "steps of linear warmup", "a tenth of the steps")
    weight_decay: float | None = in_training(0.0, "applied to weight matrices")
    validate_every: int | None = in_training(
        None, "steps between validations", f"a quarter of the steps, at least {EVERY}"
    )

    out: PathName | None = in_run(None, "a new folder", "runs/finetuned, -2, -3, ...", stored=False)


def settled(args: argparse.Namespace) -> FinetuneOptions:
    """Every option: as given, else of the resumed run, else the default.

    ValueError for impossible options, and for options that a resumed run may not change.
    """
    before, given = stored_and_given(FinetuneOptions, args)
    options = FinetuneOptions(**before | given)
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
        options.validate_every = max(EVERY, options.steps // 4)
    return options


def with_paths(options: FinetuneOptions) -> FinetuneOptions:
    """The options to store in the run. --model stays as given: an adapter names its base by it."""
    paths: dict[str, Any] = {name: getattr(options, name) for name in ("data", "tokenizer")}
    paths = {name: path and str(Path(path).absolute()) for name, path in paths.items()}
    return dataclasses.replace(options, **paths)
