"""`python -m benchmarks`: time a training step, or inference, of named shapes beside PyTorch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command, contestants, machine, report, step, stored
from benchmarks.contestants import PEER
from benchmarks.harness import Disagreement, Ended
from benchmarks.shapes import BY_NAME, SHAPES, Shape
from xformer import backends


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each shape, print its table, write its JSON. Returns 1 if a shape has no result."""
    args, status = parse(argv), 0
    for name in args.shape:
        shape = BY_NAME[name]
        try:
            result = run(shape, args)
        except (Disagreement, Ended, MemoryError) as error:
            print(f"benchmarks: nothing is reported of {name}.\n{error}", file=sys.stderr)
            status = 1
            continue
        print(report.text(result))
        out = stored.path_of(result, f"step-{name}", args.out)
        stored.write(result, out)
        print(f"\nWritten: {out}\n")
    return status


def run(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape. Returns the result with the machine, versions and commit, for the JSON."""
    names = args.contestant or contestants.default(shape)
    chosen = args.work or step.works(shape)
    rounds = args.rounds or shape.rounds
    libraries = [name.split()[0] for name in names]
    result = machine.describe([n for n in backends.NAMES if n in libraries])
    result |= {"threads": machine.threads(), "load": machine.load()}
    result["absent"] = [why for name in contestants.names() if (why := contestants.why_not(name))]
    total = step.ticks(names, rounds, chosen)
    with command.ticking(shape.name, total) as tick:
        return result | step.measure(shape, names, rounds, chosen, tick)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Wrong values end the program with a message before any measuring."""
    parser = command.parser("benchmarks", __doc__)
    parser.add_argument(
        "--shape",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(BY_NAME)}; repeatable (default: all)",
    )
    parser.add_argument(
        "--contestant",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(contestants.names())}; repeatable (default: {PEER}, and every "
        "installed library with its fast kernels)",
    )
    parser.add_argument(
        "--work",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(step.WORKS)}; repeatable (default: step, or forward for a shape "
        "of inference)",
    )
    command.add_rounds(parser)
    command.add_out(parser)
    args = parser.parse_args(argv)
    args.shape = _unique(args.shape or [shape.name for shape in SHAPES])
    args.contestant, args.work = _unique(args.contestant or []), _unique(args.work or [])
    known = {"shape": BY_NAME, "contestant": contestants.names(), "work": step.WORKS}
    for option, names in known.items():
        for name in getattr(args, option):
            if name not in names:
                parser.error(f"--{option} must be one of {', '.join(names)}, got {name!r}")
    for name in args.contestant:
        if why := contestants.why_not(name):
            parser.error(f"--contestant: {why}")
    for name in args.shape:
        if not BY_NAME[name].training and set(args.work) - {"forward"}:
            parser.error(f"--work must be forward for {name}, got {', '.join(args.work)}")
    return args


def _unique(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(command.run(main))
