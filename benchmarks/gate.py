"""`python -m benchmarks.gate`: times that a change of numba's kernels must not make worse.

It measures the shapes of `benchmarks.shapes`, the options and families of `benchmarks.gate_shapes`,
and time per token. Each is one interleaved run of torch, plain NumPy, numba's kernels op by op, and
numba's programs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import command, contestants, decoding, machine, report, step, stored
from benchmarks.gate_shapes import BY_NAME
from benchmarks.harness import Disagreement, Ended

TEXTS = ("stories260K", "char-gpt")  # of benchmarks.decoding; here named "decoding-<text>"
DECODING = {f"decoding-{name}": decoding.BY_NAME[name] for name in TEXTS}
NAMES = (*BY_NAME, *DECODING)
# The contestant of decoding that is shown in a column of training steps.
OF_TEXTS = {
    "numpy kernel": "xformer numpy",
    "numba kernel": "xformer numba ops",
    contestants.PROGRAM: "xformer numba",
}
FEWER = 3  # rounds: the shape's number divided by 3, and at least 3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each shape, print its table, write its JSON. Returns 1 if a shape has no result."""
    args, status, results = parse(argv), 0, list[dict[str, Any]]()
    for name in args.shape or NAMES:
        try:
            result = _described(name) | measure(name, args.rounds)
        except (Disagreement, Ended, MemoryError) as error:
            print(f"benchmarks: nothing is reported of {name}.\n{error}", file=sys.stderr)
            status = 1
            continue
        print(decoding.table(result) if name in DECODING else report.text(result))
        out = stored.path_of(result, f"gate-{name}", args.out)
        stored.write(result, out)
        print(f"\nWritten: {out}\n")
        results.append(result | {"shape": name})
    print(summary(results))
    return status


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Wrong values end the program with a message before any measuring."""
    parser = command.parser("benchmarks.gate", __doc__)
    parser.add_argument("--shape", action="append", choices=NAMES, help="repeatable (default: all)")
    command.add_rounds(parser)
    command.add_out(parser)
    args = parser.parse_args(argv)
    command.require("transformers")
    for why in filter(None, map(contestants.why_not, contestants.GATE)):
        parser.error(why)
    return args


def measure(name: str, rounds: int | None) -> dict[str, Any]:
    """Measure the shape or text `name`; return the result. rounds: None for the default."""
    measured: Any = DECODING.get(name) or BY_NAME[name]
    rounds = rounds or max(FEWER, measured.rounds // FEWER)
    if name in DECODING:
        total = len(decoding.GATE) * (rounds + 1)
        with command.ticking(name, total) as tick:
            return decoding.measure(measured, rounds, tick, decoding.GATE)
    works = step.works(measured)
    total = step.ticks(contestants.GATE, rounds, works)
    with command.ticking(name, total) as tick:
        return step.measure(measured, contestants.GATE, rounds, works, tick)


def _described(name: str) -> dict[str, Any]:
    """Return machine, versions and commit of a result."""
    description = machine.describe(["numpy", "torch", "numba"], (*machine.PACKAGES, "transformers"))
    return description | {"threads": machine.threads(), "load": machine.load()}


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table, one row per shape: the peer's time, and the ratio of each contestant."""
    columns = contestants.GATE[1:]
    rows = [["", "torch ms", *(f"{name} x" for name in columns)]]
    for result in results:
        is_text = result["shape"] in DECODING
        work = "token" if is_text else result["work"]
        by_name = {row["name"]: row[work] for row in result["rows"]}
        cells = [result["shape"], report.digits(by_name[result["peer"]]["min_ms"])]
        for name in columns:
            times = by_name.get(OF_TEXTS[name] if is_text else name)
            cells.append("-" if times is None else f"{times['ratio']:.3f}")
        rows.append(cells)
    return report.align(rows)


if __name__ == "__main__":
    sys.exit(command.run(main))
