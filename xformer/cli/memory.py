"""`xformer memory`: what a training step holds in memory, account by account."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xformer.cli.paths import nonempty
from xformer.cli.summary import Row, inspected, scaled, table
from xformer.ledger import Ledger, ledger, measured_peak
from xformer.optim import OPTIMISERS
from xformer.shapes import FLOATING
from xformer.summary import LENGTH, context, ranges

ABOUT = (
    "What a training step holds in arrays: a lower bound, since Python takes 1.4 to 2 MB more, a "
    "tenth of what the preset tiny needs. A moving average (another copy of the parameters) and "
    "accumulation are not counted. Of a run the model alone is read: its batch, context and "
    "optimiser are those of the options here."
)


def add_parser(subparsers: Any) -> None:
    """Add `xformer memory`."""
    parser = subparsers.add_parser(
        "memory",
        help="show what a training step holds in memory, and what it really takes",
        description=ABOUT,
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="PATH",
        type=nonempty,
        required=True,
        help="a folder of Hugging Face's format or made by xformer train, or a llama2.c .bin",
    )
    add("--batch", type=int, default=1, help="sequences at once; 1 unless given")
    add("--length", type=int, help=f"tokens of each; unless given, {LENGTH} or the context if less")
    add("--dtype", default="float32", choices=FLOATING, help="computed in; float32 unless given")
    add("--optimiser", default="adamw", choices=OPTIMISERS, help="adamw unless given")
    add(
        "--activation-checkpointing",
        action="store_true",
        help="keep the input of each layer alone, and compute the rest again",
    )
    add("--measure", action="store_true", help="train for a few steps, on NumPy, and compare")
    add("--json", action="store_true", help="print one JSON object, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table, or the JSON. The weights are not read."""
    model, _ = inspected(Path(args.model))
    network = getattr(model, "network", model)
    network = dataclasses.replace(network, activation_checkpointing=args.activation_checkpointing)
    length = min(LENGTH, context(network) or LENGTH) if args.length is None else args.length
    options: Any = {
        "batch": args.batch,
        "length": length,
        "dtype": args.dtype,
        "optimiser": args.optimiser,
    }
    found = ledger(network, **options)
    if args.measure:
        print("training for a few steps, to measure", file=sys.stderr, flush=True)
    measured = measured_peak(network, **options) if args.measure else None
    if args.json:
        print(json.dumps(data(found) | options | {"measured": measured}, indent=2))
        return 0
    rows = [("memory", "", f"{args.dtype}, batch {args.batch:,}, length {length:,}")]
    print(table(iter([*rows, *accounts(found, args.optimiser, measured)]), right=(1,)))
    return 0


def data(found: Ledger) -> dict[str, Any]:
    """The accounts and their sums, by name."""
    names = ("grads", "backward", "update", "peak")
    return found._asdict() | {name: getattr(found, name) for name in names}


def accounts(found: Ledger, optimiser: str, measured: int | None) -> Iterator[Row]:
    """A row an account; layers that keep as much are one row."""
    yield "  parameters", scaled(found.params, "B"), ""
    yield "  gradients", scaled(found.grads, "B"), ""
    yield "  optimiser", scaled(found.state, "B"), f"what {optimiser} keeps between steps"
    yield "  saved set", scaled(sum(found.saved.values()), "B"), "kept for the backward"
    for names, size in alike(found.saved):
        yield f"    {names}", scaled(size, "B"), "each" if ", " in names or "-" in names else ""
    yield "  at work", scaled(found.loss_work, "B"), "in the backward of the loss, at most"
    yield "", scaled(found.layer_work, "B"), "of a layer, at most"
    yield "", scaled(found.update_work, "B"), "in the optimiser, at most"
    yield "  scratch", scaled(found.scratch, "B"), "that kernels keep from call to call"
    yield "  backward", scaled(found.backward, "B"), "with what it works with, its most"
    yield "  update", scaled(found.update, "B"), "parameters, gradients, and the optimiser at work"
    yield "  peak", scaled(found.peak, "B"), "the larger of the two, and scratch"
    if measured is not None:
        share = f"{found.peak / measured:.1%} of it is accounted for"
        yield "  measured", scaled(measured, "B"), share


def alike(saved: dict[str, int]) -> Iterator[tuple[str, int]]:
    """The parts of a saved set that keep something; layers that keep as much together."""
    groups: dict[tuple[str, int], list[int]] = {}
    for name, size in saved.items():
        stem, _, number = name.rpartition(" ")
        if number.isdigit():
            groups.setdefault((stem, size), []).append(int(number))
        elif size:
            groups[name, size] = []
    for (stem, size), numbers in groups.items():
        yield f"{stem}{'s' * (len(numbers) > 1)} {ranges(numbers)}" if numbers else stem, size
