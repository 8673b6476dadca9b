"""What `benchmarks.embeddings` found, in Markdown, and on the page that shows it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- run -->\n", "<!-- end -->\n"


def update(page: Path, found: Mapping[str, Any], result: Path) -> None:
    """Put a run, whose JSON lies in `result`, in the place of the one on the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}{shown(page, found, result)}{END}{after}", encoding="utf-8")


def shown(page: Path, found: Mapping[str, Any], result: Path) -> str:
    """What stands on the page."""
    link = Path(os.path.relpath(result, page.parent)).as_posix()
    return f"{text(found)}\n[All figures]({link}).\n"


def text(found: Mapping[str, Any]) -> str:
    """The table, and where it came about."""
    cpu, threads = found["machine"]["cpu"], found["threads"]["cpus"]
    versions = {name: v for row in found["rows"] for name, v in row["versions"].items()}
    load = "" if found["load"] is None else f", load before it {found['load']:.1f}"
    commit = (found["commit"] or "none")[:9] + (" with local changes" if found["dirty"] else "")
    lines = [
        table(found),
        "",
        f"{found['date']}, {cpu}, {found['machine']['system']}, {threads} threads each{load}.",
        f"Python {found['python']}, {', '.join(f'{n} {v}' for n, v in sorted(versions.items()))}.",
        f"Commit {commit}. {found['starts']} starts and {found['rounds']} rounds, in turns; the",
        f"fastest of each. Sentences of {found['words']:.0f} words on average, in float32; the",
        f"embeddings differ by {found['difference']:.0e} at most.",
    ]
    return "\n".join(lines)


def table(found: Mapping[str, Any]) -> str:
    """Times and rates are those of the fastest run."""
    rows = found["rows"]

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
            for work in found["works"]
        ),
    ]
    if all(row["peak_bytes"] is not None for row in rows):
        lines.append(line("peak memory", [row["peak_bytes"] / 1e6 for row in rows], 0, " MB"))
    return "\n".join(lines)
