"""The result of a run: as a table in Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xformer.base.files import replacing


def text(result: dict[str, Any]) -> str:
    """Return the result of one shape in Markdown."""
    products = result["products"]
    return f"""\
{header(result)}

## {result["shape"]}: {result["model"]}

{result["dtype"]}, {result["rounds"]} rounds of {result["repeats"]}; {products["gflop"]:.4g} GFLOP \
of necessary products, alone in {digits(products["min_ms"])} ms, {products["gflop_per_s"]:.0f} \
GFLOP/s

{table(result)}{further(result)}"""


def further(result: dict[str, Any]) -> str:
    """Return lines on contestants that did not fit into memory with the first, and on warnings."""
    lines = []
    for run in result["runs"][1:]:
        names = ", ".join(name for name in run["contestants"] if name != result["peer"])
        line = f"Later, for want of memory: {names}"
        if run["peer"] is not None:
            text = ", ".join(
                f"{w} {digits(times['min_ms'])} ms" for w, times in run["peer"].items()
            )
            line += f"; beside them {result['peer']}, {text}"
        lines.append(f"\n\n{line}.")
    lines += [f"\n\nNot measured: {why}." for why in result["left_out"]]
    lines += [f"\n\n{what}." for what in warned({row["name"]: row for row in result["rows"]})]
    return "".join(lines)


def warned(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a line "NAME warned: TEXT" for each warning of each contestant.

    The library warns if another kernel runs than the measured one.
    rows: the result of each contestant, by name; its "warnings" are a list of texts
    """
    texts = {name: row.get("warnings", []) for name, row in rows.items()}
    return [f"{name} warned: {text}" for name, warnings in texts.items() for text in warnings]


def header(result: dict[str, Any]) -> str:
    """Return lines on machine, versions and commit, and an explanation of the table."""
    machine, commit = result["machine"], result["commit"]
    at = f"commit {commit[:12]}" if commit else "no commit"
    if result["dirty"]:
        at += " with local changes"
    load = "" if result["load"] is None else f", load before it {result['load']:.1f}"
    return f"""\
{result["date"]}, xformer {result["versions"]["xformer"]}, {at}
{machine["cpu"]}, {machine["system"]} {machine["architecture"]}; {result["threads"]["cpus"]} \
threads{load}
Python {result["python"]}; {"; ".join(result["backends"].values())}

Milliseconds: minimum (median); x: minimum over torch eager's minimum. Light: time of the necessary
products alone over that of the {result["work"]}. Dispatch: a call, and its share of the \
{result["work"]}. Error: the
largest relative one, against {result["judge"]} in float64."""


def table(result: dict[str, Any]) -> str:
    """Return the table, one row per contestant."""
    works = result["works"]
    head = [result["shape"], *(column for work in works for column in (f"{work} ms", "x"))]
    head += ["tokens/s", "light", "peak MB", "dispatch", "error"]
    rows = [head]
    for row in result["rows"]:
        cells = [row["name"] + (" (alone)" if row.get("alone") else "")]
        for work in works:
            times = row.get(work)
            if times is None:  # not measured yet
                cells += ["-", "-"]
                continue
            cells.append(f"{digits(times['min_ms'])} ({digits(times['median_ms'])})")
            cells.append("-" if times["ratio"] is None else f"{times['ratio']:.2f}")
        cells.append(f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else "-")
        cells.append(f"{row['light']:.0%}" if "light" in row else "-")
        peak = row.get("peak_bytes")
        cells.append("-" if peak is None else f"{peak / 1e6:.0f}")
        cells.append(dispatching(result, row))
        cells.append("-" if row["error"] is None else f"{row['error']:.0e}")
        rows.append(cells)
    return align(rows)


def dispatching(result: dict[str, Any], row: dict[str, Any]) -> str:
    """Return the microseconds of dispatch per op call, and its share of the work's time."""
    cost = row.get("dispatch")
    if cost is None:
        return "-"
    cell = f"{1e6 * cost['seconds'] / cost['calls']:.1f} us"
    if result["work"] in row:
        cell += f", {1e3 * cost['seconds'] / row[result['work']]['min_ms']:.2%}"
    return cell


def write(result: dict[str, Any], path: Path) -> None:
    """Write `result` as JSON, as a whole or not at all."""
    replace(path, json.dumps(result, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file, as a whole or not at all; create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as (part,):
        part.write_text(text, encoding="utf-8")


def put(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the text of `page` between the lines `begin` and `end` by `text`."""
    before, after = around(page, begin, end)
    replace(page, f"{before}{begin}{text}{end}{after}")


def around(page: Path, begin: str, end: str) -> tuple[str, str]:
    """Return the texts of `page` before the line `begin` and after the line `end`.

    Raises ValueError if the page lacks one of these lines. Measure only if it has them.
    """
    before, first, rest = page.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"{page} must hold the lines {begin.strip()} and {end.strip()}")
    return before, after


def digits(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def align(rows: list[list[str]]) -> str:
    """Return a Markdown table with columns padded to equal widths; rows[0] is the header."""
    # Markdown takes "-:" under a column of numbers, not ":".
    widths = [max(2, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *others])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in rows[1:])])
