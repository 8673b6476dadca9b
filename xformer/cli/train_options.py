"""The options of `xformer train`, and the options that a resumed run has stored."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xformer.cli import train_from
from xformer.cli.config_file import add_config
from xformer.cli.parser import Parser
from xformer.cli.paths import BACKEND, DEVICE, nonempty
from xformer.cli.run_options import (
    FLAG,
    NO_RUN,
    Stored,
    add_shared,
    begun_or_new,
    by_option,
    dashed,
    given,
)
from xformer.cli.summary import Row, table
from xformer.dispatch.checks import finite, require_sizes
from xformer.dispatch.shapes import STORED
from xformer.generation import Bytes
from xformer.layers.block import NORMS
from xformer.models import GPT
from xformer.pretrained.matching import shapes_of
from xformer.training import TrainConfig
from xformer.training.dashboards import MODULES


class Preset(NamedTuple):
    """Defaults for the sizes of a model and of its training."""

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
HEADS = ("preset", "layers", "width", "heads", "context", "batch", "steps", "peak lr", "parameters")
# Defaults of the options that a preset does not set.
DEFAULTS: dict[str, Any] = {
    "origin": None,
    "data": None,
    "tokenizer": None,
    "preset": "small",
    "positions": "learned",
    "position_mode": "add",
    "norm_placement": "pre",
    "residual_scale": None,
    "init": "gpt2",
    "memory": None,
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
    "reversible": False,
    "activation_checkpointing": False,
    "deterministic": False,
    "compile": None,
    "shard_optimiser": False,
    "checkpoint_every": 100,
    "keep_checkpoints": 2,
    "sample_every": None,
    "log_to": "none",
}
# Types of the options whose default is None.
TYPES: dict[str, type] = {
    **dict.fromkeys(("origin", "data", "tokenizer", "device", "precision"), str),
    **dict.fromkeys(("weight_decay", "ema", "residual_scale"), float),
    **dict.fromkeys(("patience", "sample_every", "memory"), int),
    "compile": bool,
}
DTYPES = ("float32", "float64")
POSITIONS, MODES = ("learned", "sinusoidal", "none", "xl"), ("add", "concat", "qkv")
INITS = ("gpt2", "fixup")
LOGS = ("none", *MODULES)
# Options that may differ when a run is resumed: they do not change what is computed.
FREE = (
    *("data", "backend", "device", "activation_checkpointing", "deterministic", "compile"),
    *("shard_optimiser", "checkpoint_every", "keep_checkpoints", "sample_every", "log_to"),
)
# Options that the model of --from fixes.
OWN = (
    *("tokenizer", "layers", "d_model", "heads", "dropout"),
    *("positions", "position_mode", "memory", "norm_placement", "residual_scale", "init"),
    "reversible",
)
OPTIONS = Stored(
    "train",
    PRESETS["small"]._asdict() | DEFAULTS,
    TYPES,
    {
        "preset": [*PRESETS],
        "dtype": DTYPES,
        "precision": STORED,
        "positions": POSITIONS,
        "position_mode": MODES,
        "norm_placement": NORMS,
        "init": INITS,
        "log_to": LOGS,
    },
    FREE,
)


def add_options(parser: Parser) -> None:
    """Add all options. The value of an option that is not given is None."""
    parser.after = presets
    _add_data(parser)
    _add_model(parser)
    _add_training(parser)
    _add_run(parser)


def presets() -> str:
    """The presets as a table, with the number of parameters for a vocabulary of bytes."""
    rows: list[Row] = [HEADS]
    for name, preset in PRESETS.items():
        model = GPT(Bytes.size, preset.layers, preset.d_model, preset.heads, preset.max_len)
        n_params = sum(map(math.prod, shapes_of(model).values()))
        rows.append((name, *map(str, preset), f"{n_params:,}"))
    numbers = range(1, len(HEADS))
    return f"presets, with the parameters for bytes as tokens:\n{table(iter(rows), numbers)}"


def usual(name: str) -> str:
    """The default of an option by preset: "default: tiny 2, small 4, medium 6"."""
    values = (f"{key} {getattr(preset, name)}" for key, preset in PRESETS.items())
    return f"default: {', '.join(values)}"


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("text").add_argument
    what = "a UTF-8 file, a folder of UTF-8 files, a .jsonl file, or a folder of xformer prepare"
    source = f"{what} (default: the source of Python's standard library)"
    add("--data", metavar="PATH", type=nonempty, help=source)
    kinds = "bytes, characters, bpe:SIZE, or a folder with a tokenizer"
    add("--tokenizer", metavar="NAME", help=f"{kinds} (default: bytes, or the prepared folder's)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--preset", choices=PRESETS, help="defaults of the sizes, see below (default: small)")
    add("--layers", type=int, metavar="N", help=f"number of layers ({usual('layers')})")
    add("--d-model", type=int, metavar="N", help=f"width of the model ({usual('d_model')})")
    add("--heads", type=int, metavar="N", help=f"attention heads ({usual('heads')})")
    add("--max-len", type=int, metavar="N", help=f"context length ({usual('max_len')})")
    kinds = "xl: relative ones, and a memory of earlier tokens, as in Transformer-XL"
    add("--positions", choices=POSITIONS, help=f"{kinds} (default: learned)")
    modes = "add them to the embeddings, concatenate them, or add them to queries, keys and values"
    add("--position-mode", choices=MODES, help=f"{modes} (default: add)")
    add("--norm-placement", choices=NORMS, help="of each block (default: pre)")
    scale = "initial value of a learned number that multiplies each sublayer"
    add("--residual-scale", type=float, metavar="X", help=f"{scale} (0: ReZero; default: none)")
    add("--init", choices=INITS, help="initial weights (default: gpt2; fixup: without norms)")
    add("--dropout", type=float, metavar="RATE", help="default: 0")
    memory = "with --positions xl: earlier tokens that are attended to (default: --max-len)"
    add("--memory", type=int, metavar="N", help=memory)
    add(
        "--reversible",
        **FLAG,
        help="reversible blocks: a backward of any depth saves the activations of one block",
    )
    add(
        "--activation-checkpointing",
        **FLAG,
        help="recompute activations in backward: the same numbers with less memory, slower",
    )
    add("--backend", **BACKEND)
    add("--device", help=DEVICE)
    add("--dtype", choices=DTYPES, help="default: float32")
    stored = "round weights and activations to this dtype, on cupy; parameters stay float32"
    add("--precision", choices=STORED, help=stored)
    bits = "the same bits in every run on a GPU, may be slower (a CPU always gives the same bits)"
    add("--deterministic", **FLAG, help=bits)
    compiled = "compile the training step if the backend can (default: on backend numba)"
    add("--compile", **FLAG, help=compiled)


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    steps = f"steps in all ({usual('steps')}); may be larger with --resume"
    add("--steps", type=int, help=steps)
    add("--batch", type=int, metavar="N", help=f"sequences in a batch ({usual('batch')})")
    add_shared(add, "--accumulate", "1")
    lr = f"peak learning rate ({usual('lr')}; with --from a pretrained model {train_from.LR})"
    add("--lr", type=float, help=lr)
    add_shared(add, "--schedule", "cosine")
    add_shared(add, "--warmup", "50")
    add_shared(add, "--optimiser", "adamw")
    add_shared(add, "--shard-optimiser")
    add_shared(add, "--weight-decay", "0.1; 0 for adam and sgd")
    add_shared(add, "--clip", "1; 0: no clipping")
    average = "also keep an exponential moving average of the weights"
    add("--ema", type=float, metavar="DECAY", help=average)
    add_shared(add, "--validate-every", "100")
    held_out = "validate on N batches, spread evenly over the held-out text (default: 8)"
    add("--validate-batches", type=int, metavar="N", help=held_out)
    add_shared(add, "--patience")
    add("--seed", type=int, help="default: 0")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add(
        "--out",
        metavar="DIR",
        type=nonempty,
        help="a new folder (default: runs/gpt, runs/gpt-2, ...)",
    )
    add_shared(add, "--resume")
    add_shared(add, "--auto-resume")
    add_config(add)
    start = "start from this model: a run, or a Hugging Face folder"
    add("--from", dest="origin", metavar="FOLDER", type=nonempty, help=start)
    add_shared(add, "--resume-step")
    add_shared(add, "--checkpoint-every", "100")
    add_shared(add, "--keep-checkpoints", "2")
    sample = "steps between samples of the model, which are printed (default: none)"
    add("--sample-every", type=int, metavar="STEPS", help=sample)
    to = "also show the numbers of the log in TensorBoard or Weights & Biases (default: none)"
    add("--log-to", choices=LOGS, help=to)


def settled(args: argparse.Namespace) -> argparse.Namespace:
    """Every option: as given, else of the resumed run, else of the preset, else the default.

    ValueError for impossible options, and for options that a resumed run may not change.
    """
    if args.resume is not None and args.config is not None:
        raise ValueError("--config starts a new run: it excludes --resume, which has its options")
    if args.resume is not None and args.origin is not None:
        raise ValueError("--from starts a new run: it excludes --resume")
    args = begun_or_new(args)
    before, specified = OPTIONS.resumed(args), given(args)
    origin = args.origin or before.get("origin")
    if args.resume is None and "preset" in specified:
        before = {name: before[name] for name in before if name not in Preset._fields}
    if args.resume is None and origin is not None:
        before = _of_origin(origin, specified) | before
    options = DEFAULTS | NO_RUN | before | specified
    sizes = PRESETS[options["preset"]]._asdict()
    options = sizes | options
    if options["precision"] is not None and options["dtype"] != "float32":
        raise ValueError(f"--precision needs --dtype float32, got {options['dtype']}")
    if options["init"] == "fixup" and options["norm_placement"] != "none":
        raise ValueError(
            f"--init fixup needs --norm-placement none, got {options['norm_placement']}"
        )
    if options["residual_scale"] is not None:
        finite("train", "--residual-scale", options["residual_scale"])
    if options["positions"] == "xl":
        options["memory"] = options["max_len"] if options["memory"] is None else options["memory"]
        require_sizes("train", 0, **{"--memory": options["memory"]})
        if options["reversible"]:
            raise ValueError("--positions xl excludes --reversible")
    elif options["memory"] is not None:
        raise ValueError(f"--memory needs --positions xl, got {options['positions']}")
    for name in ("data", "origin"):
        if options[name] is not None:
            options[name] = str(Path(options[name]).absolute())
    for name in ("max_len", "checkpoint_every", "keep_checkpoints", "sample_every"):
        if options[name] is not None:
            require_sizes("train", 1, **{f"--{dashed(name)}": options[name]})
    return argparse.Namespace(**options)


def by_long_name(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `OPTIONS.kept` that a new run needs to be the same, by their long names."""
    fixed = () if notes["origin"] is None else OWN
    return {
        "from" if name == "origin" else dashed(name): notes[name]
        for name in (*DEFAULTS, *Preset._fields)
        if name not in fixed
    }


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
            weight_decay=options.weight_decay,
            clip=options.clip or None,
            ema=options.ema,
            eval_every=options.validate_every,
            eval_batches=options.validate_batches,
            patience=options.patience,
            seed=options.seed,
            precision=options.precision,
        )


def _of_origin(folder: str, specified: dict[str, Any]) -> dict[str, Any]:
    """The defaults by the model of --from. ValueError for given options that the model fixes."""
    for name in OWN:
        if name in specified:
            raise ValueError(f"--{dashed(name)} excludes --from: the model in {folder} fixes it")
    usual = train_from.usual(folder)
    if specified.get("max_len", 0) > usual.most:
        raise ValueError(
            f"--max-len must be at most {usual.most}, the context of the model in {folder}, "
            f"got {specified['max_len']}"
        )
    return usual.options
