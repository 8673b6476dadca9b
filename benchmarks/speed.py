"""`python -m benchmarks.speed`: a machine's newest run of every shape, in tables and a picture.

It reads the JSON of `benchmarks`, `benchmarks.decoding` and `benchmarks.starts`, and measures
nothing. Machines are named by their processor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, report, stored
from benchmarks.contestants import COMPILED, JITTED, PEER
from benchmarks.embeddings_page import END

BEGIN = "<!-- speed -->\n"
OURS = ("numpy kernel", "numba kernel")
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
    "numpy kernel": "NumPy",
    "numba kernel": "NumPy with numba",
    "mkl kernel": "numba and MKL",
    "cupy kernel": "CuPy",
    "torch kernel": "torch",
    JITTED: "jax.jit",
}
COLOURS = ("#9a9a9a", "#c9c9c9", "#1f4e8c", "#5b8fd0", "#8fb8e8", "#4f8f5b", "#b5651d", "#d8b65a")
Runs = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; with --page write them to a page, with --picture draw the picture."""
    parser = command.parser("benchmarks.speed", __doc__)
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=stored.RESULTS)
    parser.add_argument(
        "--machine", action="append", metavar="CPU", help="repeatable; default: the newest run's"
    )
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="put the table there")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="needs the extra plot")
    args = parser.parse_args(argv)
    runs = [runs_of(args.results, machine) for machine in args.machine or [None]]
    for machine, newest_runs in zip(args.machine or [""], runs, strict=True):
        if not any(newest_runs.values()):
            where = f" of a machine named {machine!r}" if machine else ""
            parser.error(f"--results: there is no run of a shape{where} in {args.results}")
    print(text(runs))
    if args.page is not None:
        link = Path(os.path.relpath(args.results, args.page.parent)).as_posix()
        put(args.page, shown(runs, link))
    if args.picture is not None:
        draw([r["step"] for r in runs if r["step"]] or [{}], args.picture)
    return 0


MEANING = """\
x: minimum over the peer's minimum in one interleaved run; below 1 is faster, or smaller.
Peak memory and speed of light: of NumPy / with numba. Speed of light: the time of the matrix
products that the work needs, by NumPy's BLAS (numba's own may be faster), over that of the work."""
QUESTIONS = {"step": STEPS, "decoding": TOKENS, "start": STARTS}


def runs_of(folder: Path, machine: str | None) -> dict[str, Runs]:
    """Return for each question the newest run of each shape on `machine`.

    machine: a processor's name; None for the machine of the newest run.
    """
    every: dict[str, list[Any]] = {}
    for question, shapes in QUESTIONS.items():
        files = (
            path for shape in shapes for path in folder.glob(f"**/{question}-{shape}-[0-9]*.json")
        )
        runs = [stored.read(path) for path in files]
        every[question] = [r for r in runs if question != "step" or r["work"] in r["works"]]
    if machine is None:
        last = max((r for runs in every.values() for r in runs), key=_date, default=None)
        machine = None if last is None else last["machine"]["cpu"]
    return {
        question: newest([r for r in runs if r["machine"]["cpu"] == machine], QUESTIONS[question])
        for question, runs in every.items()
    }


def newest(runs: Sequence[Any], shapes: Iterable[str]) -> dict[str, Any]:
    """Return the newest run of each shape that was measured."""
    by_shape = {shape: [run for run in runs if run["shape"] == shape] for shape in shapes}
    return {shape: max(group, key=_date) for shape, group in by_shape.items() if group}


def _date(run: Mapping[str, Any]) -> str:
    return str(run["date"])


def text(machines: Sequence[Mapping[str, Runs]]) -> str:
    """Return the tables of each machine, with its versions and commits."""
    parts = []
    for runs in machines:
        tables = [steps(runs["step"])] if runs["step"] else []
        if runs["decoding"] or runs["start"]:
            tables.append(alone(runs))
        parts += [*tables, origin(runs)]
    return "\n\n".join([*parts, MEANING])


def steps(runs: Runs) -> str:
    """Return a table, one row per shape: the peer's time, and each contestant's ratio to it."""
    measured = [n for n in HEADS if any(n in _rows(run) for run in runs.values())]
    others = [name for name in measured if name != PEER]
    head = ["", f"{HEADS[PEER]}, ms", *(f"{HEADS[n]}, x" for n in others)]
    lines = [[*head, "peak memory, x", "speed of light"]]
    for shape, run in runs.items():
        rows, work = _rows(run), run["work"]
        cells = [STEPS[shape], _ms(rows[PEER][work]["min_ms"]) if PEER in rows else "-"]
        for name in others:
            ratio = rows[name][work]["ratio"] if name in rows else None
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        lines.append([*cells, *_memory_and_light(rows)])
    return report.align(lines)


def _memory_and_light(rows: Mapping[str, Any]) -> list[str]:
    """Return two cells on the contestants of OURS: peak memory over the peer's, speed of light."""
    ours, peer = [rows.get(name) for name in OURS], rows.get(PEER)
    ratios = [f"{x:.2f}" if (x := _memory(row, peer)) is not None else "-" for row in ours]
    light = ["-" if row is None else f"{row['light']:.0%}" for row in ours]
    return [" / ".join(ratios), " / ".join(light)]


def _memory(row: Mapping[str, Any] | None, peer: Mapping[str, Any] | None) -> float | None:
    if row is None or peer is None or None in (row["peak_bytes"], peer["peak_bytes"]):
        return None
    return float(row["peak_bytes"] / peer["peak_bytes"])


def alone(runs: Mapping[str, Runs]) -> str:
    """Return a table of the time per token at batch 1, and of process starts."""
    lines = [["", "peer", "peer, ms", "NumPy, ms", "x", "with numba, x"]]
    for question, work in (("decoding", "token"), ("start", "start")):
        for shape, run in runs[question].items():
            rows, peer = _rows(run), run["peer"]
            ours, theirs = rows["xformer numpy"][work], rows[peer][work]
            title, times = QUESTIONS[question][shape], (theirs["min_ms"], ours["min_ms"])
            compiled = rows[COMPILED_TOKEN][work]["ratio"] if COMPILED_TOKEN in rows else None
            ratios = ("-" if x is None else f"{x:.2f}" for x in (ours["ratio"], compiled))
            lines.append([title, peer, *map(_ms, times), *ratios])
    return report.align(lines)


def origin(runs: Mapping[str, Runs]) -> str:
    """Return lines on days, machine, versions and commits."""
    every = [run for by_shape in runs.values() for run in by_shape.values()]
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
        f"Commit {', '.join(commits)}."
    )


def shown(runs: Sequence[Mapping[str, Runs]], link: str) -> str:
    """Return the tables for the page, with a link to the folder of all results."""
    return f"{text(runs)}\n[All figures]({link}).\n"


def put(page: Path, shown: str) -> None:
    """Replace the text between the lines BEGIN and END of `page` by `shown`.

    Raises ValueError if the page lacks one of these lines.
    """
    report.put(page, BEGIN, END, shown)


def draw(machines: Sequence[Runs], path: Path) -> None:
    """Draw bars of the ratios to torch eager: a panel per machine, a group of bars per shape."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"the picture needs matplotlib: pip install 'xformer-array[plot]' ({error})"
        ) from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "speed"  # equal input gives an equal file
    import matplotlib.pyplot as plt

    every = [run for runs in machines for run in runs.values()]
    names = [n for n in HEADS if n != PEER and any(n in _rows(run) for run in every)]
    shapes = [shape for shape in STEPS if any(shape in runs for runs in machines)]
    figure, axes = plt.subplots(
        *(1, len(machines)),
        figsize=(4 + 4 * len(machines), 0.6 + 0.55 * len(shapes)),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    height = 0.8 / max(len(names), 1)
    for panel, runs in zip(axes[0], machines, strict=True):
        for i, name in enumerate(names):
            bars = [(shapes.index(shape), _ratio(run, name)) for shape, run in runs.items()]
            bars = [(at, ratio) for at, ratio in bars if ratio is not None]
            positions = [at + (i - (len(names) - 1) / 2) * height for at, _ in bars]
            colour = COLOURS[list(HEADS).index(name)]
            panel.barh(positions, [r for _, r in bars], height, color=colour, label=HEADS[name])
        panel.axvline(1, color="#404040", lw=1)
        panel.set_xlabel(_cpu(runs))
        panel.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_yticks(range(len(shapes)), [STEPS[shape] for shape in shapes])
    axes[0, 0].invert_yaxis()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        *(handles, labels),
        title="time over torch eager's: left of the line is faster",
        loc="outside upper center",
        frameon=False,
        ncols=len(names),
    )
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _cpu(runs: Runs) -> str:
    return " ".join({run["machine"]["cpu"]: None for run in runs.values()})


def _ratio(run: Mapping[str, Any], name: str) -> float | None:
    row = _rows(run).get(name)
    return None if row is None else row[run["work"]]["ratio"]


def _rows(run: Mapping[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in run["rows"]}


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(command.run(main))
