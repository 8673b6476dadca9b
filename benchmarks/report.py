"""What a run found: as a table to read, as JSON to keep."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def text(found: dict[str, Any]) -> str:
    """A run of one shape in Markdown."""
    products = found["products"]
    return f"""\
{header(found)}

## {found["shape"]}: {found["model"]}

{found["dtype"]}, {found["rounds"]} rounds of {found["repeats"]}; {products["gflop"]:.4g} GFLOP of \
necessary products, alone in {digits(products["min_ms"])} ms, {products["gflop_per_s"]:.0f} \
GFLOP/s

{table(found)}{further(found)}"""


def further(found: dict[str, Any]) -> str:
    """Who did not fit into memory with the first: had turns beside the peer later, or none."""
    lines = []
    for run in found["runs"][1:]:
        names = ", ".join(name for name in run["contestants"] if name != found["peer"])
        line = f"Later, for want of memory: {names}"
        if run["peer"] is not None:
            times = ", ".join(f"{w} {digits(took['min_ms'])} ms" for w, took in run["peer"].items())
            line += f"; beside them {found['peer']}, {times}"
        lines.append(f"\n\n{line}.")
    lines += [f"\n\nNot measured: {why}." for why in found["left_out"]]
    lines += [f"\n\n{what}." for what in warned({row["name"]: row for row in found["rows"]})]
    return "".join(lines)


def warned(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """What contestants have warned of, by name: other kernels than those that were asked for."""
    texts = {name: row.get("warnings", []) for name, row in rows.items()}
    return [f"{name} warned: {text}" for name, warnings in texts.items() for text in warnings]


def header(found: dict[str, Any]) -> str:
    """Machine, versions, commit, and how to read the table."""
    machine, commit = found["machine"], found["commit"]
    at = f"commit {commit[:12]}" if commit else "no commit"
    if found["dirty"]:
        at += " with local changes"
    load = "" if found["load"] is None else f", load before it {found['load']:.1f}"
    return f"""\
{found["date"]}, xformer {found["versions"]["xformer"]}, {at}
{machine["cpu"]}, {machine["system"]} {machine["architecture"]}; {found["threads"]["cpus"]} \
threads{load}
Python {found["python"]}; {"; ".join(found["backends"].values())}

Milliseconds: minimum (median); x: minimum over torch eager's minimum. Light: time of the necessary
products alone over that of the {found["work"]}. Dispatch: a call, and its share of the \
{found["work"]}. Error: the
largest relative one, against {found["judge"]} in float64."""


def table(found: dict[str, Any]) -> str:
    """Of each contestant one row."""
    works = found["works"]
    head = [found["shape"], *(column for work in works for column in (f"{work} ms", "x"))]
    head += ["tokens/s", "light", "peak MB", "dispatch", "error"]
    rows = [head]
    for row in found["rows"]:
        cells = [row["name"] + (" (alone)" if row.get("alone") else "")]
        for work in works:
            times = row.get(work)
            if times is None:  # it has had no turn yet
                cells += ["-", "-"]
                continue
            cells.append(f"{digits(times['min_ms'])} ({digits(times['median_ms'])})")
            cells.append("-" if times["ratio"] is None else f"{times['ratio']:.2f}")
        cells.append(f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else "-")
        cells.append(f"{row['light']:.0%}" if "light" in row else "-")
        peak = row.get("peak_bytes")
        cells.append("-" if peak is None else f"{peak / 1e6:.0f}")
        cells.append(dispatching(found, row))
        cells.append("-" if row["error"] is None else f"{row['error']:.0e}")
        rows.append(cells)
    return align(rows)


def dispatching(found: dict[str, Any], row: dict[str, Any]) -> str:
    """Microseconds a call, and its share of the work."""
    cost = row.get("dispatch")
    if cost is None:
        return "-"
    cell = f"{1e6 * cost['seconds'] / cost['calls']:.1f} us"
    if found["work"] in row:
        cell += f", {1e3 * cost['seconds'] / row[found['work']]['min_ms']:.2%}"
    return cell


def write(result: dict[str, Any], path: Path) -> None:
    """As JSON, whole or not at all."""
    replace(path, json.dumps(result, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file, whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def digits(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def align(rows: list[list[str]]) -> str:
    """Markdown whose columns also stand under each other as plain text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in rows[1:])])
