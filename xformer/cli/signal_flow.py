"""`xformer signal-flow`: sizes of activations and gradients by layer, before training."""

from __future__ import annotations

import argparse
from typing import Any

from xformer.cli.parser import Parser
from xformer.cli.plot import add_out
from xformer.plots.flow import KINDS, at_initialisation, flow_picture
from xformer.plots.style import require_drawable, save


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer signal-flow`."""
    parser.description = "Compare decoders with random weights, by depth and norm placement."
    add = parser.add_argument
    depths = (3, 6, 12, 24)
    what = f"layers of each model (default: {' '.join(map(str, depths))})"
    add("--layers", type=int, nargs="+", default=depths, metavar="N", help=what)
    add("--d-model", type=int, default=128, metavar="D", help="default: 128")
    add("--heads", type=int, default=4, metavar="H", help="default: 4")
    kinds = f"norm placements to compare, of {', '.join(KINDS)}; rezero and fixup have no norms"
    norms: Any = {"metavar": "PLACEMENT", "nargs": "+", "choices": KINDS}
    add("--norms", **norms, default=("pre", "post"), help=f"{kinds} (default: pre post)")
    add("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    add_out(parser, "flow.png")


def run(args: argparse.Namespace) -> int:
    """Print the gradient norms, draw the picture and print its path."""
    require_drawable(args.out)
    flows = []
    for norm in dict.fromkeys(args.norms):
        for depth in sorted(set(args.layers)):
            flow = at_initialisation(norm, depth, args.d_model, args.heads, args.seed)
            first, last = flow.gradients[0], flow.gradients[-1]
            sizes = f"{first:.3g} in the first layer, {last:.3g} in the last"
            print(f"{norm}, {depth} layers: gradient norm {sizes}", flush=True)
            flows.append(flow)
    print(save(flow_picture(flows), args.out))
    return 0
