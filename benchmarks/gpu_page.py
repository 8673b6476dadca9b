"""What `benchmarks.gpu` has found, in Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks import gpu_kernels, report

MEMORY = """\
Times: minimum (median). Peak: what the pool of CuPy or torch has grown to; of JAX, which tells no
more, what its arrays took."""


def text(found: dict[str, Any]) -> str:
    """What was found, in Markdown."""
    done, parts = found["sections"], [header(found)]
    if "tests" in done:
        parts.append(", ".join(f"{n} tests {what}" for what, n in done["tests"].items()) + ".")
    rows = [[name, f"{1e6 * s:.2f} us"] for name, s in done.get("costs", {}).items()]
    for name, rate in done.get("rates", {}).items():
        rows.append([name, f"{rate / 1e12:.3g} T{'B' if name == 'copy' else 'FLOP'}/s"])
    if rows:
        parts.append(report.align([["of the host, of the device", ""], *rows]))
    if "kernels" in done:
        parts.append(report.align(gpu_kernels.kernel_table(done["kernels"])))
    parts += [report.table(run) for run in done.values() if "works" in run]
    if "decoding" in done:
        parts.append(report.align(decoding_table(done["decoding"])))
    parts.append(MEMORY)
    if found["wrong"]:
        parts.append("\n".join(["Wrong, or not run:", *(f"- {what}" for what in found["wrong"])]))
    return "\n\n".join(parts)


def header(found: dict[str, Any]) -> str:
    """When, what, where."""
    commit = (found["commit"] or "none")[:12] + (" with local changes" if found["dirty"] else "")
    dry = " A dry run: no figure means anything." if found["dry_run"] else ""
    own = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    at = f"{found['date']}, commit {commit}, Python {found['python']}, {found['device']}"
    return f"{at}; {own}.{dry}"


def decoding_table(rows: dict[str, Any]) -> list[list[str]]:
    """Cells of a table."""
    lines = [["a token at batch 1", "ms", "x", "peak MB"]]
    for name, row in rows.items():
        times = f"{row['min_ms']:.3f} ({row['median_ms']:.3f})"
        lines.append([name, times, f"{row['ratio']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}"])
    return lines
