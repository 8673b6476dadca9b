"""Where results are stored, and `python -m benchmarks.stored`: older results become rows.

results/<machine>/machine.json      the machine, once
results/<machine>/<question>-<day>-<commit>.json   the newest result of each question
results/history.csv                 a row for each time of the older ones

A question is the name of a result without its day and commit.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

RESULTS = Path(__file__).parent / "results"
DEFAULT = "default: the folder of this machine in benchmarks/results"
MACHINE, HISTORY = "machine.json", "history.csv"
NAME = re.compile(r"(?P<question>.+)-\d{4}-\d\d-\d\d-(?:[0-9a-f]+|no-commit)(?:-dirty)?\.json")
COLUMNS = (
    *("machine", "question", "date", "commit", "dirty", "contestant", "work"),
    *("min_ms", "median_ms", "ratio", "peak_bytes", "blas"),
)


def path_of(found: dict[str, Any], question: str, folder: Path | None = None) -> Path:
    """Where a result is written: in `folder`; by default in the folder of its machine."""
    if folder is None:
        folder = RESULTS / slug(found["machine"])
    return folder / default_name(found, question)


def default_name(found: dict[str, Any], question: str = "step") -> str:
    """By day and commit, so that a result does not replace one of other code."""
    commit = (found["commit"] or "no-commit")[:9] + ("-dirty" if found["dirty"] else "")
    return f"{question}-{found['date'][:10]}-{commit}.json"


def slug(machine: dict[str, Any]) -> str:
    """The name of a machine's folder: its GPU or its processor, and the number of its CPUs."""
    words = re.sub(r"\(R\)|\(TM\)", "", machine.get("gpu") or machine["cpu"])
    return re.sub(r"[^a-z0-9]+", "-", f"{words} {machine['cpus']} cpus".lower()).strip("-")


def write(found: dict[str, Any], path: Path) -> None:
    """Write a result as JSON, whole or not at all.

    In a machine's folder of `RESULTS` the machine is written once, beside it. ValueError if the
    folder is of another machine.
    """
    if path.parent.parent == RESULTS:
        machine = path.with_name(MACHINE)
        if not machine.exists():
            report.replace(machine, json.dumps(found["machine"], indent=1) + "\n")
        if (there := json.loads(machine.read_text(encoding="utf-8"))) != found["machine"]:
            raise ValueError(f"{machine} is of {there}, and the result of {found['machine']}")
        found = {name: value for name, value in found.items() if name != "machine"}
    report.write(found, path)


def read(path: Path) -> dict[str, Any]:
    """A result, with its machine."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "machine" not in found:
        found["machine"] = json.loads(path.with_name(MACHINE).read_text(encoding="utf-8"))
    return found


def archive(results: Path = RESULTS) -> tuple[list[Path], list[Path]]:
    """Move all but the newest result of each question to `HISTORY`.

    Returns the files that were moved, and those that stay because they have no rows of times.
    """
    questions: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(results.glob("*/*.json")):
        if name := NAME.fullmatch(path.name):
            questions.setdefault((path.parent, name["question"]), []).append(path)
    older, kept, rows = [], [], set(_history(results / HISTORY))
    for (folder, question), paths in questions.items():
        *before, _ = sorted(paths, key=lambda path: read(path)["date"])
        for path in before:
            found = set(rows_of(read(path), folder.name, question))
            (older if found else kept).append(path)
            rows |= found
    if older:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([COLUMNS, *sorted(rows)])
        report.replace(results / HISTORY, text.getvalue())
    for path in older:
        path.unlink()
    return older, kept


def _history(path: Path) -> Iterator[tuple[str, ...]]:
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            yield from list(map(tuple, csv.reader(file)))[1:]


def rows_of(found: dict[str, Any], machine: str, question: str) -> Iterator[tuple[str, ...]]:
    """The rows of `HISTORY` of a result: one for each contestant and work."""
    listed = found.get("rows")
    for row in listed if isinstance(listed, list) else []:
        threads = row.get("threads") or found.get("threads", {})
        blas = " ".join(threads.get("blas_kernels", []))
        for work, times in row.items():
            if isinstance(times, dict) and "min_ms" in times:
                cells = (
                    *(machine, question, found["date"], found["commit"], found["dirty"]),
                    *(row["name"], work, times["min_ms"], times.get("median_ms")),
                    *(times.get("ratio"), row.get("peak_bytes"), blas),
                )
                yield tuple("" if cell is None else str(cell) for cell in cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Move older results of all machines to the history. Returns 1 if some cannot be moved."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stored", description=main.__doc__)
    parser.parse_args(argv)
    moved, kept = archive()
    for path in moved:
        print(f"{path.name}: now in {HISTORY}")
    for path in kept:
        why = f"it has no rows of times, which {HISTORY} could hold"
        print(f"{path} stays beside a newer result: {why}", file=sys.stderr)
    return int(bool(kept))


if __name__ == "__main__":
    sys.exit(main())
