"""`xformer memory`: the memory of a training step, item by item."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xformer.base.printing import size
from xformer.cli.parser import Parser
from xformer.cli.summary import add_sizes, inspected
from xformer.cli.table import Row, table
from xformer.dispatch.checks import require_memory
from xformer.inspection.ledger import Ledger, ledger, measured_peak
from xformer.inspection.summary import LENGTH, context, ranges
from xformer.optim import OPTIMISERS

ABOUT = (
    "The memory of the arrays of a training step. The measured memory may be smaller, as pages "
    "that are never touched take none, or larger: Python takes 1.4 to 2 MB more, about 10 percent "
    "of what the preset tiny needs. A moving average (another copy of the "
    "parameters) and gradient accumulation are not counted. If --model is a training run, only its "
    "model is read; batch, sequence length and optimiser are the options below."
)


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer memory`."""
    parser.description = ABOUT
    add_sizes(parser)
    add = parser.add_argument
    add("--optimiser", default="adamw", choices=OPTIMISERS, help="default: adamw")
    less = "save only the input of each layer and compute the rest again in backward"
    add("--activation-checkpointing", action="store_true", help=less)
    add("--measure", action="store_true", help="also train for a few steps on NumPy and measure")


def run(args: argparse.Namespace) -> int:
    """Print the table, or the JSON. The weights are not read."""
    model, _ = inspected(Path(args.model))
    model = dataclasses.replace(model, activation_checkpointing=args.activation_checkpointing)
    most = context(model)
    length = min(LENGTH, most or LENGTH) if args.seq_len is None else args.seq_len
    what = f"activations of a layer, which runs, for --batch {args.batch} texts of {length} tokens"
    n_tokens = args.batch * length
    require_memory(what, 4 * n_tokens * model.blocks[0].d_model)
    options: Any = {name: getattr(args, name) for name in ("batch", "dtype", "optimiser")}
    options["length"] = length
    result = ledger(model, **options)
    if args.measure:
        print("measuring: training for a few steps", file=sys.stderr, flush=True)
    measured = measured_peak(model, **options) if args.measure else None
    if args.json:
        print(json.dumps(data(result) | options | {"measured": measured}, indent=2))
        return 0
    rows = [("memory", "", f"{args.dtype}, batch {args.batch:,}, length {length:,}")]
    print(table([*rows, *accounts(result, args.optimiser, measured)], right=(1,)))
    return 0


def data(result: Ledger) -> dict[str, Any]:
    """The items and their sums, by name."""
    names = ("grads", "backward", "update", "peak")
    return result._asdict() | {name: getattr(result, name) for name in names}


def accounts(result: Ledger, optimiser: str, measured: int | None) -> Iterator[Row]:
    """A row for each item. Layers that save equally much share a row."""
    yield "  parameters", size(result.params), ""
    yield "  gradients", size(result.grads), ""
    yield "  optimiser", size(result.state), f"the state of {optimiser}"
    if result.segment_memory:
        yield "  segment memory", size(result.segment_memory), "before and after the step, each"
    yield "  saved set", size(sum(result.saved.values())), "saved for backward"
    for names, nbytes in alike(result.saved):
        yield f"    {names}", size(nbytes), "each" if ", " in names or "-" in names else ""
    yield "  temporaries", size(result.loss_work), "in the backward of the loss, at most"
    yield "", size(result.layer_work), "in the backward of a layer, at most"
    yield "", size(result.update_work), "in the optimiser, at most"
    yield "  scratch", size(result.scratch), "buffers that kernels keep between calls"
    yield "  backward", size(result.backward), "peak of backward, with temporaries"
    yield "  update", size(result.update), "peak of the update, with temporaries"
    yield "  peak", size(result.peak), "the larger of the two, plus scratch"
    if measured is not None:
        share = f"the items above explain {result.peak / measured:.1%} of it"
        yield "  measured", size(measured), share


def alike(saved: dict[str, int]) -> Iterator[tuple[str, int]]:
    """The non-empty parts of a saved set. Layers that save equally much are one part."""
    groups: dict[tuple[str, int], list[int]] = {}
    for name, nbytes in saved.items():
        stem, _, number = name.rpartition(" ")
        if number.isdigit():
            groups.setdefault((stem, nbytes), []).append(int(number))
        elif nbytes:
            groups[name, nbytes] = []
    for (stem, nbytes), numbers in groups.items():
        yield f"{stem}{'s' * (len(numbers) > 1)} {ranges(numbers)}" if numbers else stem, nbytes
