"""`python -m benchmarks.starts`: from the start of a process to the first logits of a model.

Import, load, one forward of a few tokens, in a new process each time; the files of model and
libraries are in the system's cache of files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks import harness, machine, report, stored
from benchmarks.decoding import BY_NAME, varied
from benchmarks.harness import Disagreement
from xformer import pretrained

PEER = "torch eager"
NAMES = (PEER, "transformers", "xformer numpy")
SHAPES = ("char-gpt", "gpt2")
ROUNDS = 8
TOLERANCE = 1e-4  # of logits in float32, beside their largest


def main(argv: Sequence[str] | None = None) -> int:
    """Run; of each model print a table and write JSON. Returns 1 where logits differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.starts", description=__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    parser.add_argument("--rounds", type=int, metavar="N", default=ROUNDS)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=stored.DEFAULT)
    args = parser.parse_args(argv)
    for name in args.shape or SHAPES:
        found = machine.describe(["numpy", "torch"], (*machine.PACKAGES, "transformers"))
        found |= {"threads": machine.threads(), "load": machine.load()}
        total = len(NAMES) * (args.rounds + 1)
        try:
            with tqdm(total=total, desc=name, disable=None, leave=False) as bar:
                found |= measure(name, BY_NAME[name].config, args.rounds, bar.update)
        except Disagreement as wrong:
            print(f"benchmarks: nothing is reported.\n{wrong}", file=sys.stderr)
            return 1
        print(table(found))
        out = stored.path_of(found, f"start-{name}", args.out)
        stored.write(found, out)
        print(f"\nWritten: {out}\n")
    return 0


def measure(
    shape: str, config: Mapping[str, Any], rounds: int, tick: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Compare the logits, then measure in turns."""
    model = pretrained.model(config)
    with tempfile.TemporaryDirectory() as folder:
        pretrained.save(model, varied(model), folder)
        difference = check({name: logits(name, folder) for name in NAMES})
        turns = {name: partial(harness.timed, partial(start, name, folder)) for name in NAMES}
        seconds = harness.interleave(turns, rounds, tick)
    rows = [{"name": n, "start": harness.summary(seconds[n], seconds[PEER])} for n in NAMES]
    return {"shape": shape, "rounds": rounds, "difference": difference, "peer": PEER, "rows": rows}


def start(name: str, folder: str) -> harness.Process:
    """A process that has its first logits."""
    command = [sys.executable, Path(__file__).with_name("starter.py"), name, folder]
    return harness.Process(name, command, machine.environment() | {"HF_HUB_OFFLINE": "1"})


def logits(name: str, folder: str) -> np.ndarray:
    """The first logits of a start."""
    with start(name, folder) as process:
        return np.asarray(process.ask(show={}))


def check(found: Mapping[str, np.ndarray]) -> float:
    """The largest relative difference to the peer's; Disagreement beyond TOLERANCE."""
    want = found[PEER]
    errors = {name: float(np.abs(a - want).max() / np.abs(want).max()) for name, a in found.items()}
    for name, error in errors.items():
        if not error <= TOLERANCE:
            raise Disagreement(f"{name} differs from {PEER} by {error:.1e}")
    return max(errors.values())


def table(found: Mapping[str, Any]) -> str:
    """Of each contestant one row."""
    rows = [[f"{found['shape']}: process start to first logits", "s", "x"]]
    for row in found["rows"]:
        took = row["start"]
        times = f"{took['min_ms'] / 1e3:.2f} ({took['median_ms'] / 1e3:.2f})"
        rows.append([row["name"], times, f"{took['ratio']:.3f}"])
    return report.align(rows)


if __name__ == "__main__":
    sys.exit(main())
