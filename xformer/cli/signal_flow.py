"""`xformer signal-flow`: sizes of activations and gradients by layer, before any training."""

from __future__ import annotations

import argparse
from typing import Any

from xformer.cli.plot import add_out
from xformer.layers.block import NORMS
from xformer.plots.flow import at_initialisation, flow_picture
from xformer.plots.style import require_drawable, save


def add_parser(subparsers: Any) -> None:
    """Add `xformer signal-flow`."""
    parser = subparsers.add_parser(
        "signal-flow",
        help="draw how large activations and gradients are, layer by layer",
        description="Of decoders of random weights that differ in where their norms stand.",
    )
    add = parser.add_argument
    depths = (3, 6, 12, 24)
    what = f"of one model or several (default: {' '.join(map(str, depths))})"
    add("--layers", type=int, nargs="+", default=depths, metavar="N", help=what)
    add("--d-model", type=int, default=128, metavar="D", help="default: 128")
    add("--heads", type=int, default=4, metavar="H", help="default: 4")
    add("--norms", nargs="+", choices=NORMS, default=("pre", "post"), help="default: pre post")
    add("--seed", type=int, default=0, help="of the weights (default: 0)")
    add_out(parser, "flow.png")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw, and say where."""
    require_drawable(args.out)
    flows = []
    for norm in dict.fromkeys(args.norms):
        for depth in sorted(set(args.layers)):
            found = at_initialisation(norm, depth, args.d_model, args.heads, args.seed)
            first, last = found.gradients[0], found.gradients[-1]
            sizes = f"{first:.3g} in the first, {last:.3g} in the last"
            print(f"{norm}, {depth} layers: norm of the gradient {sizes}", flush=True)
            flows.append(found)
    print(save(flow_picture(flows), args.out))
    return 0
