"""`xformer plot`: draw loss, learning rate, gradient norm and speed of training runs."""

from __future__ import annotations

import argparse

from xformer.cli.parser import Parser
from xformer.cli.paths import nonempty
from xformer.cli.progress import each
from xformer.plots.curves import AXES, training_curves
from xformer.plots.log import read_log
from xformer.plots.style import require_drawable, save


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer plot`."""
    what = "a folder written by xformer train or finetune"
    parser.add_argument("runs", nargs="+", metavar="RUN", type=nonempty, help=what)
    parser.add_argument("--x", default="step", choices=AXES, help="the x axis (default: step)")
    add_out(parser, "curves.png")


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --out, the path of the picture."""
    what = f"path of the picture, .png or .svg (default: {default})"
    parser.add_argument("--out", metavar="FILE", type=nonempty, default=default, help=what)


def run(args: argparse.Namespace) -> int:
    """Draw the curves and print the path of the picture."""
    require_drawable(args.out)
    logs = [read_log(path) for path in each(args.runs, "reading", "logs")]
    if len({log.name for log in logs}) < len(logs):
        logs = [log._replace(name=path) for log, path in zip(logs, args.runs, strict=True)]
    print(save(training_curves(logs, x=args.x), args.out))
    return 0
