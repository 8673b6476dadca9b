"""Write docs/ops.md: for each op its backward, its derivation, its kernels and its time.

python -m docs.make_ops_page

The kernels are those that backends register; the times are the newest result of
`python -m benchmarks.ops`. tests/test_ops_page.py compares the page with what this would write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ops as measured
from benchmarks import report, stored
from xformer import ops
from xformer.dispatch import Overridable

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ops.md"
CONTESTANTS = (measured.PEER, measured.REFERENCE, measured.KERNEL, measured.PROGRAM)
FILES = "op", "formula, backward", "derivation", "NumPy kernel", "numba kernel", "CUDA kernel"
FILES += ("other kernels",)
TIMES = "op", "torch", "reference", "NumPy kernels", "numba program"


def page() -> str:
    """The text of docs/ops.md with its tables made anew."""
    found, text = newest(), PAGE.read_text(encoding="utf-8")
    versions = {name: version for name, version in found["versions"].items() if name != "xformer"}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    where = f"{found['machine']['cpu']}, {found['threads']['cpus']} threads"
    caption = (
        f"Milliseconds. {where}, {found['date'][:10]}, commit {found['commit'][:9]}; {listed}."
    )
    text = put(text, "files", table(FILES, [files(name) for name in names()]))
    rows = [[f"`{name}`", *times(name, found)] for name in names()]
    return put(text, "times", f"{caption}\n\n{table(TIMES, rows, right=True)}")


def put(text: str, name: str, content: str) -> str:
    """The text with `content` between the comments `name` and end."""
    before, begin, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{begin}{content}\n{end}{after}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """A table in Markdown. right: all columns but the first are aligned to the right."""
    rule = ["---", *["---:" if right else "---"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def newest() -> dict[str, Any]:
    """The newest result of `benchmarks.ops` of any machine."""
    paths = stored.RESULTS.glob("*/ops-2*.json")
    return max(map(stored.read, paths), key=lambda found: found["date"])


def names() -> list[str]:
    """The ops of `xformer.ops`."""
    return [name for name in dir(ops) if isinstance(getattr(ops, name), Overridable)]


def files(name: str) -> list[str]:
    """The cells of an op in the table of files."""
    source = f"[`ops/{name}.py`](../xformer/ops/{name}.py)"
    kernels = (", ".join(links(name, library)) for library in ("numpy", "numba", "cupy"))
    others = [link for library in ("torch", "jax") for link in links(name, library)]
    derivation = f"[{name}](derivations/{name}.md)"
    return [f"`{name}`", source, derivation, *kernels, ", ".join(others)]


def links(name: str, library: str) -> Iterator[str]:
    """Links to the files of an op's kernels for a library."""
    if library == "numba":
        files = [Path("numba", "kernels", f"{name}.py")]
    elif library in ("numpy", "cupy"):
        modules = [k.run.__module__ for k in getattr(ops, name).import_kernels(library)]
        files = [Path(*module.split(".")[2:]).with_suffix(".py") for module in modules]
        files += [file.with_suffix(".cu") for file in files]
    else:
        files = [Path(library, f"{name}.py")]
    for file in files:
        if (ROOT / "backends" / file).exists():
            shown = file.name if library in ("numpy", "numba", "cupy") else str(file)
            yield f"[`{shown}`](../backends/{file})"


def times(name: str, found: dict[str, Any]) -> list[str]:
    """Milliseconds by contestant, the least in bold."""
    of_op: dict[str, float] = {}
    for contestant in found["rows"]:
        for work in (measured.BOTH, measured.FORWARD):
            if (summary := contestant.get(f"{name}: {work}")) is not None:
                of_op[contestant["name"]] = summary["min_ms"]
                break
    least = min(of_op.values())
    cells = {
        n: f"**{report.digits(ms)}**" if ms == least else report.digits(ms)
        for n, ms in of_op.items()
    }
    return [cells.get(contestant, "") for contestant in CONTESTANTS]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
