"""The options of `xformer train`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xformer.cli.run_options import (
    PathName,
    RunOptions,
    dashed,
    in_computation,
    in_model,
    in_run,
    in_text,
    in_training,
    stored_and_given,
)
from xformer.cli.table import Row, table
from xformer.cli.train_from import LR, OWN, defaults_from
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import STORED
from xformer.generation import Bytes
from xformer.layers.block import NORMS
from xformer.models import GPT
from xformer.pretrained.matching import shapes_of
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
SMALL = PRESETS["small"]


def by_preset(name: str) -> str:
    """The default of an option by preset: "tiny 2, small 4, medium 6"."""
    return ", ".join(f"{key} {getattr(preset, name)}" for key, preset in PRESETS.items())


@dataclass(kw_only=True)
class TrainOptions(RunOptions):
    """The options of `xformer train`."""

    command = "train"

    data: PathName | None = in_text(
        None,
        "a UTF-8 file, a folder of UTF-8 files, a .jsonl file, or a folder of xformer prepare",
        "the source of Python's standard library",
        free=True,
    )
    tokenizer: str | None = in_text(
        None,
        "bytes, characters, bpe:SIZE, or a folder with a tokenizer",
        "bytes, or the prepared folder's",
        metavar="NAME",
    )

    preset: str = in_model("small", "defaults of the sizes, see below", choices=PRESETS)
    layers: int = in_model(SMALL.layers, "number of layers", by_preset("layers"))
    d_model: int = in_model(SMALL.d_model, "width of the model", by_preset("d_model"))
    heads: int = in_model(SMALL.heads, "attention heads", by_preset("heads"))
    max_len: int = in_model(SMALL.max_len, "context length", by_preset("max_len"), least=1)
    positions: str = in_model(
        "learned",
        "xl: relative ones, and a memory of earlier tokens, as in Transformer-XL",
        choices=("learned", "sinusoidal", "none", "xl"),
    )
    position_mode: str = in_model(
        "add",
        "add them to the embeddings, concatenate them, or add them to queries, keys and values",
        choices=("add", "concat", "qkv"),
    )
    norm_placement: str = in_model("pre", "of each block", choices=NORMS)
    residual_scale: float | None = in_model(
        None, "initial value of a learned number that multiplies each sublayer", "none; 0: ReZero"
    )
    init: str = in_model("gpt2", "initial weights; fixup: without norms", choices=("gpt2", "fixup"))
    dropout: float = in_model(0.0)
    memory: int | None = in_model(
        None, "with --positions xl: earlier tokens that are attended to", "--max-len"
    )
    reversible: bool = in_model(
        False, "reversible blocks: a backward of any depth saves the activations of one block"
    )

    activation_checkpointing: bool = in_computation(
        False, "recompute activations in backward: same numbers, less memory, slower", free=True
    )
    precision: str | None = in_computation(
        None, "dtype of weights and activations, on cupy; parameters stay float32", choices=STORED
    )
    deterministic: bool = in_computation(
        False,
        "the same bits in every run on a GPU, may be slower (a CPU always gives the same bits)",
        free=True,
    )
    compile: bool | None = in_computation(
        None, "compile the training step if the backend can", "on backend numba", free=True
    )

    steps: int = in_training(
        SMALL.steps, "steps in all; may be larger with --resume", by_preset("steps")
    )
    batch: int = in_training(SMALL.batch, "sequences in a batch", by_preset("batch"))
    lr: float = in_training(
        SMALL.lr, "peak learning rate", f"{by_preset('lr')}; with --from a pretrained model {LR}"
    )
    ema: float | None = in_training(
        None, "also keep an exponential moving average of the weights with this decay"
    )
    validate_batches: int = in_training(
        8, "validate on N batches, spread evenly over the held-out text"
    )

    out: PathName | None = in_run(None, "a new folder", "runs/gpt, runs/gpt-2, ...", stored=False)
    origin: PathName | None = in_run(None, "start from this model: a run, or a Hugging Face folder")
    sample_every: int | None = in_run(
        None, "steps between samples of the model, which are printed", "none", free=True, least=1
    )
    log_to: str = in_run(
        "none", "also log to TensorBoard or Weights & Biases", free=True, choices=("none", *MODULES)
    )


def presets() -> str:
    """The presets as a table, with the number of parameters for a vocabulary of bytes."""
    rows: list[Row] = [HEADS]
    for name, preset in PRESETS.items():
        gpt = GPT(Bytes.size, preset.layers, preset.d_model, preset.heads, preset.max_len)
        n_params = sum(map(math.prod, shapes_of(gpt).values()))
        rows.append((name, *map(str, preset), f"{n_params:,}"))
    return f"presets, with the parameters for bytes as tokens:\n{table(rows)}"


def settled(args: argparse.Namespace) -> TrainOptions:
    """Every option: as given, else of the resumed run, else of the preset, else the default.

    ValueError for impossible options, and for options that a resumed run may not change.
    """
    before, given = stored_and_given(TrainOptions, args)
    if "resume" not in given:
        if "preset" in given:
            before = {name: before[name] for name in before if name not in Preset._fields}
        origin = given.get("origin", before.get("origin"))
        if origin is not None:
            before = defaults_from(origin, given) | before
    sizes = PRESETS[(before | given).get("preset", "small")]._asdict()
    options = TrainOptions(**sizes | before | given)
    if options.precision is not None and options.dtype != "float32":
        raise ValueError(f"--precision needs --dtype float32, got {options.dtype}")
    if options.init == "fixup" and options.norm_placement != "none":
        raise ValueError(f"--init fixup needs --norm-placement none, got {options.norm_placement}")
    if options.positions == "xl":
        options.memory = options.max_len if options.memory is None else options.memory
        require_sizes("train", 0, **{"--memory": options.memory})
        if options.reversible:
            raise ValueError("--positions xl excludes --reversible")
    elif options.memory is not None:
        raise ValueError(f"--memory needs --positions xl, got {options.positions}")
    for name in ("data", "origin"):
        if (path := getattr(options, name)) is not None:
            setattr(options, name, str(Path(path).absolute()))
    return options


def by_long_name(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The options in a run's notes that a new run needs to be the same, by their long names."""
    fixed = () if notes["origin"] is None else OWN
    return {dashed(name): value for name, value in notes.items() if name not in fixed}
