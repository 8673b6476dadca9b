"""`python -m benchmarks.embeddings`: sentence embeddings beside sentence-transformers, on the CPU.

It measures the size of the installation, the time to the first embedding, and embeddings per
second. Each library runs in a separate environment, `--ours VENV` and `--theirs VENV`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, embeddings_page, harness, machine, report, stored
from benchmarks.harness import Disagreement
from xformer.pretrained.foreign import require_model

OURS, THEIRS = "xformer", "sentence-transformers"
TOLERANCE = 1e-5  # of vectors of length 1 in float32
STARTS = 5  # of a process
WORKS = {"one by one": (64, None), "batches of 32": (256, 32)}  # texts, texts at once
NOT_NEEDED = ("pip", "setuptools", "pkg_resources", "_distutils_hack")  # at run time
START = (
    ("The teacher", "A young doctor", "My neighbour", "The old sailor", "Nobody", "Our new cook"),
    ("bought", "found", "forgot", "painted", "repaired", "described", "sold", "carried"),
    ("a bicycle", "the letter", "three red apples", "a map of the city", "her piano", "it"),
)
REST = (
    *("in the morning", "near the river", "for a friend", "before the rain came"),
    *("without a word", "although it was late", "with great care", "as he had promised"),
    "in the narrow street behind the market of the old town",
)


def start(name: str, python: str, folder: str) -> harness.Process:
    """Start `embedder.py`; return its process after the first embedding."""
    command = [python, Path(__file__).with_name("embedder.py"), name, folder]
    return harness.Process(name, command, machine.environment() | {"HF_HUB_OFFLINE": "1"})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Returns 1 if embeddings disagree."""
    parser = command.parser("benchmarks.embeddings", __doc__)
    parser.add_argument("--model", metavar="FOLDER", required=True)
    parser.add_argument("--ours", metavar="VENV", required=True, help="with this library")
    parser.add_argument("--theirs", metavar="VENV", required=True, help=f"with {THEIRS}")
    command.add_rounds(parser, 10)
    command.add_out_file(parser)
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="put the table there too")
    args = parser.parse_args(argv)
    if args.page is not None:
        report.around(args.page, embeddings_page.BEGIN, embeddings_page.END)
    require_model(Path(args.model))
    # Absolute: the processes run in the checkout.
    venvs = {OURS: Path(args.ours).absolute(), THEIRS: Path(args.theirs).absolute()}
    pythons = {name: str(venv / "bin" / "python") for name, venv in venvs.items()}
    result = machine.describe(["numpy"]) | {
        "threads": {"cpus": machine.n_cpus()},
        "load": machine.load(),
    }
    try:
        with command.ticking("embeddings", ticks(args.rounds)) as tick:
            result |= measure(pythons, str(Path(args.model).absolute()), args.rounds, tick)
    except Disagreement as error:
        print(f"benchmarks: embeddings disagree, nothing is reported.\n{error}", file=sys.stderr)
        return 1
    for row in result["rows"]:
        row["install_bytes"] = installed(venvs[row["name"]])
    print(embeddings_page.text(result))
    out = args.out or stored.path_of(result, "embeddings")
    stored.write(result, out)
    print(f"\nWritten: {out}")
    if args.page is not None:
        embeddings_page.update(args.page, result, out)
    return 0


def ticks(rounds: int) -> int:
    """Return how often `measure` calls `tick`."""
    return 2 * (STARTS + 1) + 2 * len(WORKS) * (rounds + 1)


def measure(
    pythons: Mapping[str, str], folder: str, rounds: int, tick: Callable[[], Any]
) -> dict[str, Any]:
    """Compare the embeddings, then time starts and embeddings in interleaved rounds."""
    texts = sentences(max(n for n, _ in WORKS.values()))
    begin = {name: partial(start, name, python, folder) for name, python in pythons.items()}
    turns: Any = {name: partial(harness.timed, fn) for name, fn in begin.items()}
    starts = harness.interleave(turns, STARTS, tick)
    running = {name: fn() for name, fn in begin.items()}
    difference = check({name: one.ask(show=texts) for name, one in running.items()})
    turns = {
        (name, work): partial(harness.timed, partial(one.ask, run=texts[:n], batch=batch))
        for name, one in running.items()
        for work, (n, batch) in WORKS.items()
    }
    seconds = harness.interleave(turns, rounds, tick)
    about = {name: one.ask(about=True) for name, one in running.items()}
    rows = []
    for name in pythons:
        row = {"name": name, **about[name], "start": harness.summary(starts[name], None)}
        for work, (n, _) in WORKS.items():
            times = harness.summary(seconds[name, work], seconds[THEIRS, work])
            row[work] = times | {"per_s": n / min(seconds[name, work])}
        rows.append(row)
    words = sum(len(text.split()) for text in texts) / len(texts)
    settings = {"rounds": rounds, "starts": STARTS, "works": list(WORKS), "words": words}
    return settings | {"difference": difference, "tolerance": TOLERANCE, "rows": rows}


def check(vectors: Mapping[str, Any]) -> float:
    """Return the largest difference of an element between the contestants' vectors.

    Raises Disagreement if it exceeds TOLERANCE.
    """
    first, *others = (np.asarray(rows) for rows in vectors.values())
    difference = max(float(np.max(np.abs(first - other))) for other in others)
    if not difference <= TOLERANCE:
        names = " and ".join(vectors)
        raise Disagreement(f"{names} differ by {difference:.1e}, allowed {TOLERANCE:.0e}")
    return difference


def installed(venv: Path) -> int:
    """Return the bytes of the packages in an environment, without NOT_NEEDED."""
    (packages,) = venv.glob("lib/python*/site-packages")
    return sum(
        path.lstat().st_size
        for path in packages.rglob("*")
        if path.is_file() and not path.relative_to(packages).parts[0].startswith(NOT_NEEDED)
    )


def sentences(n: int) -> list[str]:
    """Return `n` generated sentences of 3 to 33 words, the same ones in each call."""
    rng = random.Random(0)
    return [
        " ".join([*map(rng.choice, START), *rng.sample(REST, rng.randrange(5))]) + "."
        for _ in range(n)
    ]


if __name__ == "__main__":
    sys.exit(command.run(main))
