"""`python -m benchmarks.starts`: time from the start of a process to the first logits of a model.

Each run is a new process, which imports the library, loads the model, and computes the logits of a
few tokens. The files of model and libraries are in the system's file cache.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, harness, machine, report, stored
from benchmarks.decoding import BY_NAME, varied
from benchmarks.harness import Disagreement
from xformer import pretrained

PEER = "torch eager"
NAMES = (PEER, "transformers", "xformer numpy")
SHAPES = ("char-gpt", "gpt2")
ROUNDS = 8
TOLERANCE = 1e-4  # of logits in float32, relative to the largest logit


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each model, print its table, write its JSON. Returns 1 if logits differ."""
    parser = command.parser("benchmarks.starts", __doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    command.add_rounds(parser, ROUNDS)
    command.add_out(parser)
    args = parser.parse_args(argv)
    command.require("torch", "transformers")
    for name in args.shape or SHAPES:
        result = machine.describe(["numpy", "torch"], (*machine.PACKAGES, "transformers"))
        result |= {"threads": machine.threads(), "load": machine.load()}
        total = len(NAMES) * (args.rounds + 1)
        try:
            with command.ticking(name, total) as tick:
                result |= measure(name, BY_NAME[name].config, args.rounds, tick)
        except Disagreement as error:
            print(f"benchmarks: nothing is reported.\n{error}", file=sys.stderr)
            return 1
        print(table(result))
        out = stored.path_of(result, f"start-{name}", args.out)
        stored.write(result, out)
        print(f"\nWritten: {out}\n")
    return 0


def measure(
    shape: str, config: Mapping[str, Any], rounds: int, tick: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Compare the logits, then time process starts in interleaved rounds. Returns the result.

    shape: its name   config: of the model, in Hugging Face's format   tick: called after each start
    """
    model = pretrained.model(config)
    with tempfile.TemporaryDirectory() as folder:
        pretrained.save(model, varied(model), folder)
        difference = check({name: logits(name, folder) for name in NAMES})
        turns = {name: partial(harness.timed, partial(start, name, folder)) for name in NAMES}
        seconds = harness.interleave(turns, rounds, tick)
    rows = [{"name": n, "start": harness.summary(seconds[n], seconds[PEER])} for n in NAMES]
    return {"shape": shape, "rounds": rounds, "difference": difference, "peer": PEER, "rows": rows}


def start(name: str, folder: str) -> harness.Process:
    """Start a process; return it after it has computed its logits."""
    command = [sys.executable, Path(__file__).with_name("starter.py"), name, folder]
    return harness.Process(name, command, machine.environment() | {"HF_HUB_OFFLINE": "1"})


def logits(name: str, folder: str) -> np.ndarray:
    """Return the logits that a new process of the contestant `name` computes."""
    with start(name, folder) as process:
        return np.asarray(process.ask(show={}))


def check(logits: Mapping[str, np.ndarray]) -> float:
    """Return the largest relative difference of the logits (by contestant) to the peer's.

    Raises Disagreement if it exceeds TOLERANCE.
    """
    want = logits[PEER]
    errors = {
        name: float(np.abs(a - want).max() / np.abs(want).max()) for name, a in logits.items()
    }
    for name, error in errors.items():
        if not error <= TOLERANCE:
            raise Disagreement(f"{name} differs from {PEER} by {error:.1e}")
    return max(errors.values())


def table(result: Mapping[str, Any]) -> str:
    """Return a Markdown table of a result, one row per contestant."""
    rows = [[f"{result['shape']}: process start to first logits", "s", "x"]]
    for row in result["rows"]:
        times = row["start"]
        cell = f"{times['min_ms'] / 1e3:.2f} ({times['median_ms'] / 1e3:.2f})"
        rows.append([row["name"], cell, f"{times['ratio']:.3f}"])
    return report.align(rows)


if __name__ == "__main__":
    sys.exit(command.run(main))
