"""The result of `benchmarks.gpu` in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import gpu_kernels, report
from benchmarks.contestants import COMPILED, CUDNN, DETERMINISTIC, GRAPH, OURS_ON_GPU, PEER

WIDEST = 240  # characters of a line of an error
MEMORY = """\
Times: minimum (median). Peak: the largest size of the memory pool of CuPy or torch; for JAX, the
peak memory of its arrays. "alone": it ran out of memory beside the others, and was timed after
them."""


def text(result: dict[str, Any]) -> str:
    """Return the whole page."""
    done, parts = result["sections"], [header(result)]
    if result["running"]:
        parts.append(f"Not complete: `{result['running']}` was running when this was written.")
    if "libraries" in done:
        parts.append(libraries(done["libraries"]))
    if "tests" in done:
        parts.append(", ".join(f"{n} tests {what}" for what, n in done["tests"].items()) + ".")
    rows = [[name, f"{1e6 * s:.2f} us"] for name, s in done.get("costs", {}).items()]
    for name, rate in done.get("rates", {}).items():
        rows.append([name, f"{rate / 1e12:.3g} T{'B' if name == 'copy' else 'FLOP'}/s"])
    if rows:
        parts.append(report.align([["of the host, of the device", ""], *rows]))
    if "kernels" in done:
        parts.append(report.align(gpu_kernels.kernel_table(done["kernels"])))
    for run in done.values():
        if "works" in run:
            parts.append(report.table(run))
            parts += [f"Not measured: {short(why)}." for why in run["left_out"]]
            parts += warned({row["name"]: row for row in run["rows"]})
    for run in done.values():
        if "texts" in run:
            parts += [report.align(decoding_table(run)), *warned(run["tokens"])]
    if "attention" in done:
        parts.append(report.align(attention_table(done["attention"])))
        why = [row["no_cudnn"] for row in done["attention"]]
        parts += dict.fromkeys(f"cudnn: {refusal}." for refusal in why if refusal)
        parts += [
            f"{row['length']} tokens, {row['direction']}: {short(why)}."
            for row in done["attention"]
            for why in row["left_out"]
        ]
    if any("works" in run or "texts" in run for run in done.values()):
        parts.append(MEMORY)
    if met := goals(done):
        parts.append(report.align([["figure", "goal", "found"], *met]))
    if left_out := [
        f"- {name}: {why}" for name, all_ in result["left_out"].items() for why in all_
    ]:
        parts.append("\n".join(["Left out:", "", *left_out]))
    if result["wrong"]:
        wrong = (f"- {short(what)}" for what in result["wrong"])
        parts.append("\n".join(["Wrong, or not run (in full in the JSON):", "", *wrong]))
    return "\n\n".join(parts)


def short(what: str) -> str:
    """Return the first line of a failure and its last line, which names the error."""
    lines = [line.strip() for line in what.splitlines() if line.strip()]
    ends = [lines[0], *lines[1:][-1:]]
    return " ... ".join(line if len(line) <= WIDEST else line[:WIDEST] + " ..." for line in ends)


def warned(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the lines of `report.warned`, each shortened by `short`.

    rows: the result of each contestant, by name
    """
    return [f"{short(what)}." for what in report.warned(rows)]


def libraries(result: dict[str, Any]) -> str:
    """Return the table of `gpu_libraries.libraries`, and why other kernels do not run."""
    rows = [["op", "runs"], *(list(row) for row in result["runs"].items())]
    lines = [f"- {state}" for name, state in result["beside"].items() if not state.isdigit()]
    known = "".join(result["beside"].values())
    for name, refusals in result["not"].items():
        lines += [f"- {name}, not {why}" for why in refusals if why.partition(": ")[2] not in known]
    return "\n\n".join([report.align(rows), *(["\n".join(lines)] if lines else [])])


def header(result: dict[str, Any]) -> str:
    """Return a line with date, commit, device and versions."""
    commit = (result["commit"] or "none")[:12] + (" with local changes" if result["dirty"] else "")
    dry = " A dry run: no figure means anything." if result["dry_run"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    at = f"{result['date']}, commit {commit}, Python {result['python']}, {result['device']}"
    return f"{at}; {versions}.{dry}"


def goals(done: dict[str, Any]) -> list[list[str]]:
    """Return the goals of this library on a GPU that were measured: figure, goal, value.

    done: the results of the sections that have run, by name.
    """
    cells = list[list[str]]()
    for name in ("gpt2-bfloat16", "llama-bfloat16"):
        if name in done:
            rows = {row["name"]: row for row in done[name]["rows"]}
            cells += step_goals(name, rows)
    for name, least in (("decoding", 3.0), ("decoding-64", 1.5)):
        if name in done:
            rows = done[name]["tokens"]
            ours = [rows[n]["min_ms"] for n in (OURS_ON_GPU, GRAPH) if n in rows]
            ratio = rows[PEER]["min_ms"] / min(ours) if ours and PEER in rows else None
            cells.append([f"{name}, tokens/s over {PEER}", f"{least:g}", times(ratio)])
    moved = [row for row in done.get("kernels", []) if row["moves"]]
    if moved:
        near = [row for row in moved if row["floor"] >= 0.8 * row["seconds"]]
        share = f"{len(near)} of {len(moved)} kernels"
        cells.append(["kernels bound by memory, of their floor", "80%", share])
    for row in done.get("attention", []):
        what = f"flash, {row['length']} tokens, {row['direction']}, time over torch's"
        cells.append([what, "1", times(row["times"].get("flash", {}).get("ratio"))])
    if "curve-float32" in done and len(done["curve-float32"]["off"]) == 3:
        off = done["curve-float32"]["off"]
        spread = max(off["numpy"], off["reference"])
        what = f"losses of {done['curve-float32']['steps']} steps, off float64, over NumPy's"
        cells.append([what, "1", times(off["here"] / spread)])
    if "curve-bfloat16" in done and len(done["curve-bfloat16"]["validation"]) == 2:
        losses = done["curve-bfloat16"]["validation"]
        what = f"validation after {done['curve-bfloat16']['steps']} steps, over float32's"
        cells.append([what, "1.005", f"{losses['bfloat16'] / losses['float32']:.4f}"])
    return cells


def step_goals(name: str, rows: dict[str, Any]) -> list[list[str]]:
    """Return table rows [figure, goal, measured] for the training steps of the section `name`.

    rows: contestant -> its result with `step`, `light` and `peak_bytes`. Contestants without `step`
        or `light` are left out. No table rows if none of this library's contestants is left.
    """
    rows = {name: row for name, row in rows.items() if "step" in row and "light" in row}
    ours = [rows[n] for n in (OURS_ON_GPU, GRAPH) if n in rows]
    if not ours:  # both have failed, or are not measured yet
        return []
    best = min(ours, key=lambda row: row["step"]["min_ms"])
    cells = []
    for peer, least in ((PEER, 1.5), (CUDNN, 1.5), (COMPILED, 1.05)):
        if peer in rows:
            ratio = rows[peer]["step"]["min_ms"] / best["step"]["min_ms"]
            cells.append([f"{name}, tokens/s over {peer}", f"{least:g}", times(ratio)])
    cells.append([f"{name}, share of the product rate", "55%", f"{best['light']:.0%}"])
    if PEER in rows:
        ratio = best["peak_bytes"] / rows[PEER]["peak_bytes"]
        cells.append([f"{name}, peak memory over {PEER}", "0.7", times(ratio)])
    if {DETERMINISTIC, OURS_ON_GPU} <= rows.keys():
        ratio = rows[DETERMINISTIC]["step"]["min_ms"] / rows[OURS_ON_GPU]["step"]["min_ms"]
        cells.append([f"{name}, deterministic, time over {OURS_ON_GPU}", "1.05", times(ratio)])
    return cells


def times(ratio: float | None) -> str:
    """Return a ratio with two decimals, or "-" for None."""
    return "-" if ratio is None else f"{ratio:.2f}"


def attention_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of the table of `gpu_attention.attention`."""
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    lines = [["causal attention, bfloat16", *(f"{name}, ms" for name in names)]]
    for row in rows:
        times = [row["times"].get(name) for name in names]
        cells = ["-" if t is None else f"{t['min_ms']:.3f} ({t['median_ms']:.3f})" for t in times]
        lines.append([f"{row['length']} tokens, {row['direction']}", *cells])
    return lines


def decoding_table(run: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the table of a result of `gpu_decoding.decoded`."""
    lines = [[f"a token at batch {run['texts']}", "ms", "x", "peak MB"]]
    for name, row in run["tokens"].items():
        times = f"{row['min_ms']:.3f} ({row['median_ms']:.3f})"
        title = f"{name} (alone)" if row.get("alone") else name
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append([title, times, ratio, f"{row['peak_bytes'] / 1e6:.0f}"])
    return lines
