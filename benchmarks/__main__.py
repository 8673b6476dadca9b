"""`python -m benchmarks`: forward, backward and step of the named shapes on every backend."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import contestants, machine, report, step
from benchmarks.contestants import PEER
from benchmarks.shapes import BY_NAME, DEFAULT
from xformer import backends

RESULTS = Path(__file__).parent / "results"
# array-api-strict shows that code is right, not that it is fast.
LEFT_OUT = "array-api-strict"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the tables, write the JSON. Returns 1 where results disagree."""
    args = parse(argv)
    peer = ["torch"] if PEER in contestants.names(args.backend) else []
    libraries = _unique([*args.backend, *peer])
    found = machine.describe(libraries) | {"threads": machine.share_threads(), "shapes": []}
    rounds = {name: args.rounds or BY_NAME[name].rounds for name in args.shape}
    total = sum(step.ticks(args.backend, n) for n in rounds.values())
    try:
        with tqdm(total=total, disable=None, leave=False) as bar:
            for name, n in rounds.items():
                bar.set_description(name)
                shape = BY_NAME[name]
                found["shapes"].append(step.measure(shape, args.backend, n, bar.update))
    except step.Disagreement as wrong:
        print(f"benchmarks: results disagree, nothing is reported.\n{wrong}", file=sys.stderr)
        return 1
    print(report.text(found))
    out = args.out or RESULTS / default_name(found)
    out.parent.mkdir(exist_ok=True)
    report.write(found, out)
    print(f"\nWritten: {out}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; wrong values end the program with a message before anything is run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--shape",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(BY_NAME)}; repeatable (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(backends.NAMES)}; repeatable (default: all here but {LEFT_OUT})",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="default: by shape")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="default: in results/")
    args = parser.parse_args(argv)
    args.shape = _unique(args.shape or DEFAULT)
    args.backend = _unique(args.backend or [n for n in backends.available() if n != LEFT_OUT])
    for name in args.shape:
        if name not in BY_NAME:
            parser.error(f"--shape must be one of {', '.join(BY_NAME)}, got {name!r}")
    for name in args.backend:
        try:
            backends.get(name)
        except (ValueError, backends.Unusable) as error:
            parser.error(f"--backend: {error}")
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if args.out is not None and not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}")
    return args


def default_name(found: dict[str, Any]) -> str:
    """By day and commit, so that a result does not replace one of other code."""
    commit = (found["commit"] or "no-commit")[:9] + ("-dirty" if found["dirty"] else "")
    return f"step-{found['date'][:10]}-{commit}.json"


def _unique(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main())
