"""What a run found: as a table to read, as JSON to keep."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.step import WORKS


def text(result: dict[str, Any]) -> str:
    """The whole result in Markdown."""
    return "\n".join([header(result), *(table(shape) for shape in result["shapes"])])


def header(result: dict[str, Any]) -> str:
    """Machine, versions, commit, and how to read the tables."""
    machine, commit = result["machine"], result["commit"]
    at = f"commit {commit[:12]}" if commit else "no commit"
    if result["dirty"]:
        at += " with local changes"
    threads = ", ".join(f"{name} {count}" for name, count in result["threads"].items())
    return f"""\
{result["date"]}, xformer {result["versions"]["xformer"]}, {at}
{machine["cpu"]}, {machine["system"]} {machine["architecture"]}; threads: {threads}
Python {result["python"]}; {"; ".join(result["backends"].values())}

Milliseconds: minimum (median); x: minimum over torch eager's minimum. Error: the largest relative
one of loss, gradients and loss after a step, against float64. Peak: of a process of its own."""


def table(shape: dict[str, Any]) -> str:
    """The table of one shape."""
    works = tuple(WORKS)
    head = [shape["shape"], *(column for work in works for column in (f"{work} ms", "x"))]
    head += ["tokens/s", "peak MB", "error"]
    rows = [head]
    for row in shape["rows"]:
        cells = [row["name"]]
        for work in works:
            times = row[work]
            cells.append(f"{_digits(times['min_ms'])} ({_digits(times['median_ms'])})")
            cells.append("-" if times["ratio"] is None else f"{times['ratio']:.2f}")
        peak = row["peak_bytes"]
        cells.append(f"{row['tokens_per_s']:.0f}")
        cells.append("-" if peak is None else f"{peak / 1e6:.0f}")
        cells.append(f"{row['error']['numpy float64']:.0e}")
        rows.append(cells)
    how = f"{shape['dtype']}, {shape['rounds']} rounds of {shape['repeats']}"
    return f"""
## {shape["shape"]}: {shape["model"]}

{how}, error at most {shape["tolerance"]:.0e}

{_align(rows)}"""


def write(result: dict[str, Any], path: Path) -> None:
    """As JSON, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def _digits(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def _align(rows: list[list[str]]) -> str:
    """Markdown whose columns also stand under each other as plain text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in rows[1:])])
