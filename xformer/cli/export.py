"""`xformer export`: write a model, or a training step of it, as an ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from xformer import export
from xformer.base.printing import size
from xformer.cli.embed import add_pooling
from xformer.cli.open_model import loaded
from xformer.cli.parser import Parser
from xformer.cli.paths import MODEL, nonempty
from xformer.dispatch.shapes import FLOATING
from xformer.optim import OPTIMISERS
from xformer.pretrained.foreign import require_model
from xformer.sentences import settings

OF_EMBEDDINGS = ("pooling", "normalize")
OF_STEPS = ("optimiser", "clip", "weight_decay", "dropout_seed")


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer export`."""
    parser.description = "Write a model, or a training step of it, as an ONNX file."
    add = parser.add_argument
    add("--model", metavar="PATH", type=nonempty, required=True, help=MODEL)
    add("--out", metavar="FILE", type=nonempty, required=True, help="the file, NAME.onnx")
    add("--dtype", default="float32", choices=FLOATING, help="default: float32")
    what = "an input for the padding (default: not for a decoder, nor with --step)"
    add("--mask", action=argparse.BooleanOptionalAction, help=what)
    add("--types", action="store_true", help="an input for BERT's token types")
    what = "fix sizes, such as batch=1 length=128 (default: all are dynamic)"
    add("--sizes", nargs="+", default=[], metavar="NAME=N", help=what)
    what = "the largest length (default: the model's context)"
    add("--max-len", type=int, metavar="N", help=what)
    add = parser.add_argument_group("embeddings of texts, instead of logits").add_argument
    add("--embeddings", action="store_true", help="with the model's settings")
    add_pooling(add)
    add = parser.add_argument_group("a training step, instead of logits").add_argument
    add("--step", action="store_true", help="forward, backward, clipping and optimiser")
    add("--optimiser", choices=OPTIMISERS, help="default: adamw")
    add("--clip", type=float, metavar="NORM", help="default: 1; 0: no clipping")
    add("--weight-decay", type=float, metavar="X", help="default: the optimiser's")
    add("--dropout-seed", type=int, metavar="N", help="default: no dropout")


def run(args: argparse.Namespace) -> int:
    """Write the file, and print its inputs and outputs."""
    _require_together(args)
    path = Path(args.model)
    require_model(path)
    options: dict[str, Any] = {"sizes": _sizes(args.sizes), "max_len": args.max_len}
    if args.mask is not None:
        options["mask"] = args.mask
    model, params = loaded(path, "numpy", args.dtype)
    if args.step:
        if args.weight_decay is not None:
            options["options"] = {"weight_decay": args.weight_decay}
        if args.clip is not None:
            options["clip"] = args.clip or None
        options |= {"optimiser": args.optimiser or "adamw", "dropout_seed": args.dropout_seed}
        written = export.onnx_step(model, params, args.out, **options)
    else:
        if args.embeddings:
            own = settings(path)
            if own.modules or not own.include_prompt:
                what = "Dense modules" if own.modules else "a prompt that is not pooled"
                raise export.NotExported(f"--embeddings: {path} has {what}")
            is_causal = getattr(model, "causal", False)
            pooling = args.pooling or own.pooling or ("last" if is_causal else "mean")
            normalize = own.normalize if args.normalize is None else args.normalize
            options |= {"pooling": pooling, "normalize": normalize}
        written = export.onnx(model, params, args.out, types=args.types, **options)
    for file in written.files:
        print(f"{file}  {size(file.stat().st_size)}")
    _print("inputs", written.inputs)
    _print("outputs", written.outputs)
    return 0


def _require_together(args: argparse.Namespace) -> None:
    """ValueError for options of embeddings or steps without them, and for both at once."""
    for flag, names in (("embeddings", OF_EMBEDDINGS), ("step", OF_STEPS)):
        given = [name for name in names if getattr(args, name) is not None]
        if given and not getattr(args, flag):
            raise ValueError(f"--{given[0].replace('_', '-')} needs --{flag}")
    for name in ("embeddings", "types"):
        if args.step and getattr(args, name):
            raise ValueError(f"--step excludes --{name}")


def _sizes(texts: list[str]) -> dict[str, int]:
    sizes = {}
    for text in texts:
        name, _, n = text.partition("=")
        if not n.isdecimal():
            raise ValueError(f"--sizes must be NAME=N, such as batch=1, got {text!r}")
        sizes[name] = int(n)
    return sizes


def _print(what: str, types: dict[str, str]) -> None:
    """A row for each, but one row for all parameters and one for all arrays of a state."""
    groups = ("params.", "state.", "new.params.", "new.state.")
    rows = {name: kind for name, kind in types.items() if not name.startswith(groups)}
    for group in groups:
        if n := sum(name.startswith(group) for name in types):
            rows[f"{group}*"] = f"{n} arrays"
    width = max(map(len, rows))
    for i, (name, kind) in enumerate(rows.items()):
        print(f"{what if i == 0 else '':8}{name:{width}}  {kind}")
