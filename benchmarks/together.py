"""`python -m benchmarks.together`: one process of many threads beside many processes of one thread.

They train the same model on the same batches. Beside it: the time of an exact sum over the
processes, whose bits do not depend on their number, and of MPI's own sum. Needs the extra mpi.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, harness, machine, report, stored
from benchmarks.harness import Disagreement
from benchmarks.member import ACCUMULATE, MODELS

ROUNDS, STEPS = 5, {"tiny": 10, "char-gpt": 2}
FLOATS = 11_000_000  # of the sums: the gradients of char-gpt
TOLERANCE = 1e-4  # of the last loss, relative


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each model, print its table, write its JSON. Returns 1 if losses differ."""
    parser = command.parser("benchmarks.together", __doc__)
    parser.add_argument("--shape", action="append", choices=MODELS, help="default: all")
    command.add_rounds(parser, ROUNDS)
    options: Any = {"type": command.count, "metavar": "N", "default": FLOATS}
    parser.add_argument("--floats", **options, help="of the sums (default: %(default)s)")
    command.add_out(parser)
    args = parser.parse_args(argv)
    command.require("mpi4py")
    n = min(machine.n_cpus(), ACCUMULATE)
    for shape in args.shape or MODELS:
        result = machine.describe(["numpy"], (*machine.PACKAGES, "mpi4py"))
        result |= {"threads": machine.threads(), "load": machine.load()}
        try:
            with command.ticking(shape, 2 * (args.rounds + 1)) as tick:
                result |= measure(shape, n, args.rounds, args.floats, tick)
        except Disagreement as error:
            print(f"benchmarks: nothing is reported.\n{error}", file=sys.stderr)
            return 1
        print(table(result))
        out = stored.path_of(result, f"together-{shape}", args.out)
        stored.write(result, out)
        print(f"\nWritten: {out}\n")
    return 0


def measure(
    shape: str, n: int, rounds: int, floats: int, tick: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Train in interleaved rounds, by one process of n threads and by n processes of one.

    floats: of the sums   tick: called after each turn
    """
    peer, other = f"1 process of {n} threads", f"{n} processes of 1 thread"
    found: dict[str, list[dict[str, Any]]] = {peer: [], other: []}

    def turn(name: str, n_processes: int, threads: int) -> list[float]:
        found[name].append(run(shape, n_processes, threads, floats))
        steps: list[float] = found[name][-1]["steps"]
        return steps

    turns = {peer: lambda: turn(peer, 1, n), other: lambda: turn(other, n, 1)}
    seconds = harness.interleave(turns, rounds, tick)
    check({name: results[-1]["loss"] for name, results in found.items()}, peer)
    rows = [{"name": name, "step": harness.summary(seconds[name], seconds[peer])} for name in found]
    sums = {
        name: [s for result in found[other][1:] for s in result[name]]
        for name in ("exact", "engine")
    }
    rows += [
        {
            "name": f"{name} sum, {4 * floats / 1e6:.0f} MB",
            "sum": harness.summary(s, sums["engine"]),
        }
        for name, s in sums.items()
    ]
    return {"shape": shape, "rounds": rounds, "peer": peer, "rows": rows}


def run(shape: str, n: int, threads: int, floats: int) -> dict[str, Any]:
    """What `member.py` measures in n processes. RuntimeError if they fail."""
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise RuntimeError("there is no mpiexec: pip install 'xformer-array[mpi]'")
    member = Path(__file__).with_name("member.py")
    command = [mpiexec, "-n", str(n), sys.executable, str(member), shape, str(STEPS[shape])]
    env = os.environ | dict.fromkeys(machine.VARIABLES, str(threads))
    done = subprocess.run([*command, str(floats)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{n} processes failed: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def check(losses: Mapping[str, float], peer: str) -> None:
    """Raise Disagreement if a loss differs from the peer's by more than TOLERANCE."""
    for name, loss in losses.items():
        error = abs(loss - losses[peer]) / abs(losses[peer])
        if not error <= TOLERANCE:
            raise Disagreement(f"the loss of {name} differs from that of {peer} by {error:.1e}")


def table(result: Mapping[str, Any]) -> str:
    """Return a Markdown table of a result, one row per contestant."""
    rows = [[result["shape"], "ms", "x"]]
    for row in result["rows"]:
        times = row.get("step") or row["sum"]
        cell = f"{times['min_ms']:.1f} ({times['median_ms']:.1f})"
        rows.append([row["name"], cell, f"{times['ratio']:.3f}"])
    return report.align(rows)


if __name__ == "__main__":
    sys.exit(command.run(main))
