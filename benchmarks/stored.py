"""Where results are stored. `python -m benchmarks.stored` moves older results to the history.

results/<machine>/machine.json                     the machine
results/<machine>/<question>-<day>-<commit>.json   the newest result of each question
results/history.csv                                a row for each time of older results

A question is the name of a result without day and commit.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from xformer.cli.parser import Parser

RESULTS = Path(__file__).parent / "results"
DEFAULT = (
    "default: the current folder; in a checkout, the folder of this machine in benchmarks/results"
)
MACHINE, HISTORY = "machine.json", "history.csv"
NAME = re.compile(r"(?P<question>.+)-\d{4}-\d\d-\d\d-(?:[0-9a-f]+|no-commit)(?:-dirty)?\.json")
COLUMNS = (
    *("machine", "question", "date", "commit", "dirty", "contestant", "work"),
    *("min_ms", "median_ms", "ratio", "peak_bytes", "blas"),
)


def path_of(result: dict[str, Any], question: str, folder: Path | None = None) -> Path:
    """Return the path for a result in `folder`.

    folder: None: in a checkout the folder of the machine in `RESULTS`, elsewhere the current folder
    """
    if folder is None:
        in_checkout = Path.cwd().is_relative_to(RESULTS.parents[1])
        folder = RESULTS / slug(result["machine"]) if in_checkout else Path()
    return folder / default_name(result, question)


def default_name(result: dict[str, Any], question: str = "step") -> str:
    """Return the file's name for a result: question, day and commit."""
    commit = (result["commit"] or "no-commit")[:9] + ("-dirty" if result["dirty"] else "")
    return f"{question}-{result['date'][:10]}-{commit}.json"


def slug(machine: dict[str, Any]) -> str:
    """Return the name of a machine's folder, such as "amd-epyc-2-cpus".

    It has the GPU, or the processor if there is no GPU, and the number of CPUs.
    """
    words = re.sub(r"\(R\)|\(TM\)", "", machine.get("gpu") or machine["cpu"])
    return re.sub(r"[^a-z0-9]+", "-", f"{words} {machine['cpus']} cpus".lower()).strip("-")


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON, as a whole or not at all.

    In a machine's folder of `RESULTS` the machine is not in the result but in MACHINE. Raises
    ValueError if the folder belongs to another machine.
    """
    if path.parent.parent == RESULTS:
        machine = path.with_name(MACHINE)
        if not machine.exists():
            report.replace(machine, json.dumps(result["machine"], indent=1) + "\n")
        if (described := json.loads(machine.read_text(encoding="utf-8"))) != result["machine"]:
            raise ValueError(
                f"{machine} describes {described}, and the result is of {result['machine']}"
            )
        result = {name: value for name, value in result.items() if name != "machine"}
    report.write(result, path)


def read(path: Path) -> dict[str, Any]:
    """Read a result, and add its machine."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "machine" not in result:
        result["machine"] = json.loads(path.with_name(MACHINE).read_text(encoding="utf-8"))
    return result


def archive(results: Path = RESULTS) -> tuple[list[Path], list[Path]]:
    """Move all but the newest result of each question to `HISTORY`.

    Returns the files that were moved, and those that stay because they have no rows of times.
    """
    questions: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(results.glob("*/*.json")):
        if name := NAME.fullmatch(path.name):
            questions.setdefault((path.parent, name["question"]), []).append(path)
    older, staying, rows = [], [], set(_history(results / HISTORY))
    for (folder, question), paths in questions.items():
        *before, _ = sorted(paths, key=lambda path: read(path)["date"])
        for path in before:
            cells = set(rows_of(read(path), folder.name, question))
            (older if cells else staying).append(path)
            rows |= cells
    if older:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([COLUMNS, *sorted(rows)])
        report.replace(results / HISTORY, text.getvalue())
    for path in older:
        path.unlink()
    return older, staying


def _history(path: Path) -> Iterator[tuple[str, ...]]:
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            yield from list(map(tuple, csv.reader(file)))[1:]


def rows_of(result: dict[str, Any], machine: str, question: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of `HISTORY` for a result: one for each contestant and work."""
    listed = result.get("rows")
    for row in listed if isinstance(listed, list) else []:
        threads = row.get("threads") or result.get("threads", {})
        blas = " ".join(threads.get("blas_kernels", []))
        for work, times in row.items():
            if isinstance(times, dict) and "min_ms" in times:
                cells = (
                    *(machine, question, result["date"], result["commit"], result["dirty"]),
                    *(row["name"], work, times["min_ms"], times.get("median_ms")),
                    *(times.get("ratio"), row.get("peak_bytes"), blas),
                )
                yield tuple("" if cell is None else str(cell) for cell in cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Move older results of all machines to the history. Returns 1 if some cannot be moved."""
    parser = Parser(prog="python -m benchmarks.stored", description=main.__doc__)
    parser.parse_args(argv)
    moved, staying = archive()
    for path in moved:
        print(f"{path.name}: now in {HISTORY}")
    for path in staying:
        why = f"it has no rows of times, which {HISTORY} could hold"
        print(f"{path} stays beside a newer result: {why}", file=sys.stderr)
    return int(bool(staying))


if __name__ == "__main__":
    sys.exit(main())
