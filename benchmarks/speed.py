"""`python -m benchmarks.speed`: the newest run of every shape, as a table and as a picture.

Of the JSON that `benchmarks`, `benchmarks.decoding` and `benchmarks.starts` wrote. Nothing is
measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.__main__ import RESULTS
from benchmarks.contestants import COMPILED, JITTED, PEER
from benchmarks.embeddings_page import END

BEGIN = "<!-- speed -->\n"
OURS = "numpy kernel"
COMPILED_TOKEN = "xformer numba"
STEPS = {
    "char-gpt": "char-GPT, training step",
    "gpt2": "GPT-2 124M, training step",
    "llama": "Llama-like, training step",
    "encdec": "encoder-decoder, training step",
    "long": "context of 8192, training step",
    "tiny": "tiny, training step",
    "minilm-32": "MiniLM, 32 texts",
    "minilm-1": "MiniLM, one text",
}
TOKENS = {
    "stories260K": "stories260K, a token",
    "char-gpt": "char-GPT, a token",
    "gpt2": "GPT-2 124M, a token",
}
STARTS = {
    "char-gpt": "char-GPT, process start to first logits",
    "gpt2": "GPT-2 124M, process start to first logits",
}
HEADS = {
    PEER: "torch eager",
    COMPILED: "torch.compile",
    OURS: "NumPy",
    "numba kernel": "NumPy with numba",
    "mkl kernel": "numba and MKL",
    "cupy kernel": "CuPy",
    "torch kernel": "torch",
    JITTED: "jax.jit",
}
COLOURS = ("#9a9a9a", "#c9c9c9", "#1f4e8c", "#5b8fd0", "#8fb8e8", "#4f8f5b", "#b5651d", "#d8b65a")
Runs = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; put it on a page, draw the picture where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=RESULTS)
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="put the table there")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="needs the extra plot")
    args = parser.parse_args(argv)
    runs = {name: newest(args.results, name, shapes) for name, shapes in QUESTIONS.items()}
    if not any(runs.values()):
        parser.error(f"--results: there is no run of a shape in {args.results}")
    print(text(runs))
    if args.page is not None:
        link = Path(os.path.relpath(args.results, args.page.parent)).as_posix()
        put(args.page, shown(runs, link))
    if args.picture is not None:
        draw(runs["step"], args.picture)
    return 0


QUESTIONS = {"step": STEPS, "decoding": TOKENS, "start": STARTS}


def newest(folder: Path, question: str, shapes: Iterable[str]) -> dict[str, Any]:
    """Of each shape that was measured, its newest run of what is shown."""
    found: dict[str, Any] = {}
    for shape in shapes:
        files = folder.glob(f"{question}-{shape}-[0-9]*.json")
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        runs = [run for run in runs if question != "step" or run["work"] in run["works"]]
        if runs:
            found[shape] = max(runs, key=lambda run: run["date"])
    return found


def text(runs: Mapping[str, Runs]) -> str:
    """The tables, and where they came about."""
    tables = [steps(runs["step"])] if runs["step"] else []
    if runs["decoding"] or runs["start"]:
        tables.append(alone(runs))
    return "\n\n".join([*tables, origin(runs)])


def steps(runs: Runs) -> str:
    """Of each shape, the peer's time, and that of the others as multiples of it."""
    there = [n for n in HEADS if any(n in _rows(run) for run in runs.values())]
    others = [name for name in there if name != PEER]
    head = ["", f"{HEADS[PEER]}, ms", *(f"{HEADS[n]}, x" for n in others)]
    lines = [[*head, "NumPy's peak memory, x", "speed of light"]]
    for shape, run in runs.items():
        rows, work = _rows(run), run["work"]
        cells = [STEPS[shape], _ms(rows[PEER][work]["min_ms"]) if PEER in rows else "-"]
        for name in others:
            ratio = rows[name][work]["ratio"] if name in rows else None
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        lines.append([*cells, *_own(rows)])
    return report.align(lines)


def _own(rows: Mapping[str, Any]) -> list[str]:
    """NumPy's peak memory over the peer's, and its share of the speed of light."""
    if OURS not in rows:
        return ["-", "-"]
    own, peer = rows[OURS], rows.get(PEER)
    known = peer is not None and None not in (own["peak_bytes"], peer["peak_bytes"])
    memory = f"{own['peak_bytes'] / peer['peak_bytes']:.2f}" if known else "-"
    return [memory, f"{own['light']:.0%}"]


def alone(runs: Mapping[str, Runs]) -> str:
    """Tokens at batch 1, and starts of a process."""
    lines = [["", "peer", "peer, ms", "NumPy, ms", "x", "with numba, x"]]
    for question, work in (("decoding", "token"), ("start", "start")):
        for shape, run in runs[question].items():
            rows, peer = _rows(run), run["peer"]
            own, theirs = rows["xformer numpy"][work], rows[peer][work]
            title, times = QUESTIONS[question][shape], (theirs["min_ms"], own["min_ms"])
            compiled = rows[COMPILED_TOKEN][work]["ratio"] if COMPILED_TOKEN in rows else None
            ratios = ("-" if x is None else f"{x:.2f}" for x in (own["ratio"], compiled))
            lines.append([title, peer, *map(_ms, times), *ratios])
    return report.align(lines)


def origin(runs: Mapping[str, Runs]) -> str:
    """Machine, versions, commits."""
    every = [run for found in runs.values() for run in found.values()]
    libraries = {
        line.partition(",")[0]
        for run in every
        for name, line in run["backends"].items()
        if name != "array-api-strict"
    }
    commits = sorted(
        {
            (run["commit"] or "none")[:9] + (" with local changes" if run["dirty"] else "")
            for run in every
        }
    )
    machines = sorted(
        {f"{run['machine']['cpu']}, {run['threads']['cpus']} threads" for run in every}
    )
    days = sorted({run["date"][:10] for run in every})
    return (
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {'; '.join(machines)}. Python "
        f"{every[0]['python']}; {'; '.join(sorted(libraries))}.\n"
        f"Commit {', '.join(commits)}. x: minimum over the peer's minimum in one interleaved run; "
        "below 1 is faster, or smaller.\nSpeed of light: the time of the matrix products that the "
        "work cannot do without, over NumPy's time."
    )


def shown(runs: Mapping[str, Runs], link: str) -> str:
    """What stands on the page."""
    return f"{text(runs)}\n[All figures]({link}).\n"


def put(page: Path, shown: str) -> None:
    """Put it in the place of what stands between the marks. ValueError where they are not there."""
    old = page.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} must hold the lines {BEGIN.strip()} and {END.strip()}")
    page.write_text(f"{before}{begin}{shown}{end}{after}", encoding="utf-8")


def draw(runs: Runs, path: Path) -> None:
    """Bars of the ratios to torch eager, shape by shape."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"the picture needs matplotlib: pip install 'xformer-array[plot]' ({error})"
        ) from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "speed"  # the same picture each time
    import matplotlib.pyplot as plt

    there = [n for n in HEADS if n != PEER and any(n in _rows(run) for run in runs.values())]
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.55 * len(runs)), layout="constrained")
    height = 0.8 / max(len(there), 1)
    for i, name in enumerate(there):
        bars = [(at, _ratio(run, name)) for at, run in enumerate(runs.values())]
        bars = [(at, ratio) for at, ratio in bars if ratio is not None]
        places = [at + (i - (len(there) - 1) / 2) * height for at, _ in bars]
        colour = COLOURS[list(HEADS).index(name)]
        axes.barh(places, [r for _, r in bars], height, color=colour, label=HEADS[name])
    axes.axvline(1, color="#404040", lw=1)
    axes.set_yticks(range(len(runs)), [STEPS[shape] for shape in runs])
    axes.invert_yaxis()
    axes.set_xlabel("time over torch eager's: left of the line is faster")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _ratio(run: Mapping[str, Any], name: str) -> float | None:
    row = _rows(run).get(name)
    return None if row is None else row[run["work"]]["ratio"]


def _rows(run: Mapping[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in run["rows"]}


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
