"""The result of `benchmarks.embeddings` in Markdown, and on the page that shows it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

BEGIN, END = "<!-- run -->\n", "<!-- end -->\n"


def update(page: Path, result: Mapping[str, Any], path: Path) -> None:
    """Replace the result on `page` by `result`; path: of its JSON, for the link."""
    report.put(page, BEGIN, END, shown(page, result, path))


def shown(page: Path, result: Mapping[str, Any], path: Path) -> str:
    """Return the result in Markdown with a link to its JSON."""
    link = Path(os.path.relpath(path, page.parent)).as_posix()
    return f"{text(result)}\n[All figures]({link}).\n"


def text(result: Mapping[str, Any]) -> str:
    """Return the table, and a line on machine, versions and commit."""
    cpu, threads = result["machine"]["cpu"], result["threads"]["cpus"]
    versions = {name: v for row in result["rows"] for name, v in row["versions"].items()}
    load = "" if result["load"] is None else f", load before it {result['load']:.1f}"
    commit = (result["commit"] or "none")[:9] + (" with local changes" if result["dirty"] else "")
    lines = [
        table(result),
        "",
        f"{result['date']}, {cpu}, {result['machine']['system']}, {threads} threads each{load}.",
        f"Python {result['python']}, {', '.join(f'{n} {v}' for n, v in sorted(versions.items()))}.",
        f"Commit {commit}. {result['starts']} starts and {result['rounds']} rounds, in turns; the",
        f"fastest of each. Sentences of {result['words']:.0f} words on average, in float32; the",
        f"embeddings differ by {result['difference']:.0e} at most.",
    ]
    return "\n".join(lines)


def table(result: Mapping[str, Any]) -> str:
    """Return the table; times and rates are those of the fastest run."""
    rows = result["rows"]

    def line(what: str, values: Sequence[float], digits: int, unit: str = "") -> str:
        cells = [f"{value:.{digits}f}{unit}" for value in values]
        return f"| {what} | {' | '.join(cells)} | {values[1] / values[0]:.2f} |"

    lines = [
        f"| | {rows[0]['name']} | {rows[1]['name']} | theirs / ours |",
        "|---|---:|---:|---:|",
        line("installed", [row["install_bytes"] / 1e6 for row in rows], 0, " MB"),
        line("first embedding", [row["start"]["min_ms"] / 1e3 for row in rows], 2, " s"),
        *(
            line(f"sentences a second, {work}", [row[work]["per_s"] for row in rows], 0)
            for work in result["works"]
        ),
    ]
    if all(row["peak_bytes"] is not None for row in rows):
        lines.append(line("peak memory", [row["peak_bytes"] / 1e6 for row in rows], 0, " MB"))
    return "\n".join(lines)
