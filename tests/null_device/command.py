"""The command line: a step's launches, the table of budgets, and the cases that tests name."""

from __future__ import annotations

import argparse
import collections
import json
import sys
from typing import Any

from null_device import build, table

LIBRARIES = ("cublaslt", "cudnn")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/null_device", description=__doc__)
    commands = parser.add_subparsers(required=True)
    step = commands.add_parser("step", help="launches of a training step by kernel")
    step.set_defaults(run=show_step)
    step.add_argument("--model", choices=("gpt", "llama"), default="gpt")
    for name, size in {
        "layers": 12,
        "width": 768,
        "heads": 12,
        "vocabulary": 50257,
        "batch": 32,
        "length": 1024,
    }.items():
        step.add_argument(f"--{name}", type=int, default=size)
    step.add_argument("--kv-heads", type=int, help="of llama (default: as heads)")
    step.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    step.add_argument(
        "--with", dest="libraries", default="", help="of cublaslt, cudnn, those installed"
    )
    step.add_argument(
        "--by",
        choices=("kernel", "function"),
        default="kernel",
        help="also say which function of xformer each launch comes from",
    )
    cases = commands.add_parser("cases", help="run groups of cases; a line of JSON for each")
    cases.set_defaults(run=run_cases)
    cases.add_argument("groups", nargs="*")
    budgets = commands.add_parser("budgets", help="compare all cases with budgets.json")
    budgets.set_defaults(run=compare)
    budgets.add_argument("--update", action="store_true", help="write what was counted instead")
    budgets.add_argument("groups", nargs="*", help=f"of {', '.join(table.GROUPS)} (default: all)")
    args = parser.parse_args(argv)
    if why := build.missing():
        print(f"there is no null device: {why}", file=sys.stderr)
        return 2
    return int(args.run(args) or 0)


def show_step(args: argparse.Namespace) -> None:
    """Prints calls, bytes and launches of a steady training step."""
    from null_device import models, stand_ins, work

    model = models.sized(args)
    names = [name for name in args.libraries.split(",") if name]
    precision = None if args.dtype == "float32" else args.dtype
    with stand_ins.using(*names):
        arrays = work.ids(args.vocabulary, args.batch, args.length)
        steps = work.Steps(model, arrays, precision)
        launches: collections.Counter[Any] = collections.Counter()

        def noted(kind: str, name: str, size: int, stream: int, captured: int) -> None:
            if kind != "free":
                name = name if kind == "launch" else f"({kind}: {name})"
                launches[(name, _function() if args.by == "function" else "")] += 1

        seen = work.steady(steps, sink=noted)
    for kind in ("launch", "H2D", "D2H", "D2D", "memset", "wait", "malloc", "load"):
        size = f", {seen.bytes(kind):,} bytes" if seen.bytes(kind) else ""
        print(f"{kind:8}{seen.calls(kind):6}{size}")
    for name, n in sorted(seen.library.items()):
        print(f"{name:8}{n:6}")
    print(f"{'peak':8}{seen.peak / 1e6:12,.1f} MB of CuPy's pool above parameters and moments")
    for (name, function), n in launches.most_common():
        print(f"{n:6}  {name}  {function}")


def run_cases(args: argparse.Namespace) -> int:
    """Prints what became of each case; 1 where one fails."""
    from null_device.cases import judged, known

    failed = 0
    for found in judged(args.groups or list(known())):
        failed += found["error"] is not None
        print(json.dumps(found), flush=True)
    return int(failed > 0)


def compare(args: argparse.Namespace) -> int:
    """Prints what is wrong, and what differs from the table; 1 where anything does."""
    failed = 0
    found = []
    for group in args.groups or table.GROUPS:
        own = table.ran(group)
        found += own
        said = [f"{one['group']}: {one['case']}: {one['error']}" for one in own if one["error"]]
        if not args.update:
            said = table.faults(own, table.budgets())
        failed += len(said)
        print(f"{group}: {len(own)} cases, {len(said)} faults", *said, sep="\n  ", flush=True)
    if args.update:
        table.write(found)
    return int(failed > 0)


def _function() -> str:
    """The innermost function of xformer that is being run, backends' helpers aside."""
    frame = sys._getframe()
    found = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("xformer.") and not module.endswith((".module", ".driver")):
            found = f"{module.removeprefix('xformer.')}.{frame.f_code.co_qualname}"
            break
        frame = frame.f_back  # type: ignore[assignment]
    return found
