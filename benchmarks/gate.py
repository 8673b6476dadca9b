"""`python -m benchmarks.gate`: what a change of numba's kernels must not make slower.

Every shape of `benchmarks.shapes`, the options and families of `benchmarks.gate_shapes`, and the
time a token, each in one interleaved run of torch, plain NumPy, numba's kernels op by op, and
programs of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import contestants, decoding, machine, report, step, stored
from benchmarks.gate_shapes import BY_NAME
from benchmarks.harness import Disagreement, Ended

TEXTS = ("stories260K", "char-gpt")  # of benchmarks.decoding, here "decoding-<text>"
DECODING = {f"decoding-{name}": decoding.BY_NAME[name] for name in TEXTS}
NAMES = (*BY_NAME, *DECODING)
# Contestants of texts in the columns of steps.
OF_TEXTS = {
    "numpy kernel": "xformer numpy",
    "numba kernel": "xformer numba ops",
    contestants.PROGRAM: "xformer numba",
}
FEWER = 3  # times fewer rounds than a shape has by default, and at least as many


def main(argv: Sequence[str] | None = None) -> int:
    """Run; of each shape print a table and write JSON. Returns 1 where one has no result."""
    args, status, all_found = parse(argv), 0, list[dict[str, Any]]()
    for name in args.shape or NAMES:
        try:
            found = _described(name) | measure(name, args.rounds)
        except (Disagreement, Ended, MemoryError) as wrong:
            print(f"benchmarks: nothing is reported of {name}.\n{wrong}", file=sys.stderr)
            status = 1
            continue
        print(decoding.table(found) if name in DECODING else report.text(found))
        out = stored.path_of(found, f"gate-{name}", args.out)
        stored.write(found, out)
        print(f"\nWritten: {out}\n")
        all_found.append(found | {"shape": name})
    print(summary(all_found))
    return status


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; wrong values end the program before anything is run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument("--shape", action="append", choices=NAMES, help="repeatable (default: all)")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: by shape")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=stored.DEFAULT)
    args = parser.parse_args(argv)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if args.out is not None and not args.out.is_dir():
        parser.error(f"--out: there is no folder {args.out}")
    if importlib.util.find_spec("transformers") is None:
        parser.error("transformers is not installed")
    for why in filter(None, map(contestants.why_not, contestants.GATE)):
        parser.error(why)
    return args


def measure(name: str, rounds: int | None) -> dict[str, Any]:
    """One shape, or one text: what is found."""
    kind: Any = DECODING.get(name) or BY_NAME[name]
    rounds = rounds or max(FEWER, kind.rounds // FEWER)
    if name in DECODING:
        total = len(decoding.GATE) * (rounds + 1)
        with tqdm(total=total, desc=name, disable=None, leave=False) as bar:
            return decoding.measure(kind, rounds, bar.update, decoding.GATE)
    works = step.works(kind)
    total = step.ticks(contestants.GATE, rounds, works)
    with tqdm(total=total, desc=name, disable=None, leave=False) as bar:
        return step.measure(kind, contestants.GATE, rounds, works, bar.update)


def _described(name: str) -> dict[str, Any]:
    """Machine, versions and commit."""
    found = machine.describe(["numpy", "torch", "numba"], (*machine.PACKAGES, "transformers"))
    return found | {"threads": machine.threads(), "load": machine.load()}


def summary(all_found: Sequence[Mapping[str, Any]]) -> str:
    """Of each shape one row: the peer's time, and each contestant's minimum over it, by name."""
    columns = contestants.GATE[1:]
    rows = [["", "torch ms", *(f"{name} x" for name in columns)]]
    for found in all_found:
        is_text = found["shape"] in DECODING
        work = "token" if is_text else found["work"]
        took = {row["name"]: row[work] for row in found["rows"]}
        cells = [found["shape"], report.digits(took[found["peer"]]["min_ms"])]
        for name in columns:
            own = took.get(OF_TEXTS[name] if is_text else name)
            cells.append("-" if own is None else f"{own['ratio']:.3f}")
        rows.append(cells)
    return report.align(rows)


if __name__ == "__main__":
    sys.exit(main())
