"""Write the generated parts of docs/ops.md: a section for each op, and two tables.

python -m docs.make_ops_page

The kernels and their dtypes are those that backends register; the times are the newest result
of `python -m benchmarks.ops`. tests/test_ops_page.py compares the page with what this would write.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import ops as measured
from benchmarks import report, stored
from xformer import ops
from xformer.dispatch import Overridable
from xformer.ops.activation import BUILT_IN
from xformer.proofs.catalogue import ops as catalogue

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ops.md"
OURS = (measured.REFERENCE, measured.KERNEL, measured.PROGRAM)
TIMES = "op", "torch", "reference", "NumPy", "numba program"
RATIO = "torch / fastest"
LIBRARIES = "op", "NumPy", "`xf.compile`, numba", "CuPy", "torch", "JAX"
LABELS = {"numpy": "NumPy", "numba": "numba", "cupy": "CUDA", "torch": "torch", "jax": "JAX"}


def page() -> str:
    """The text of docs/ops.md with its generated parts made anew."""
    result, text = newest(), PAGE.read_text(encoding="utf-8")
    versions = {name: version for name, version in result["versions"].items() if name != "xformer"}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    date, commit = result["date"][:10], result["commit"][:9]
    caption = f"Milliseconds. {machine(result)}, {date}, commit {commit}; {listed}."
    rows = [[f"[{name}](#{name})", *cells(name, result), ratio(name, result)] for name in names()]
    text = put(text, "times", f"{caption}\n\n{table((*TIMES, RATIO), rows)}")
    runs = [
        [f"[{name}](#{name})", *(who_runs(name, library) for library in LABELS)] for name in names()
    ]
    text = put(text, "libraries", table(LIBRARIES, runs))
    return put(text, "ops", "\n".join(section(name, result) for name in names()))


def machine(result: dict[str, Any]) -> str:
    """The processor of a result, and the number of its threads."""
    return f"{result['machine']['cpu']}, {result['threads']['cpus']} threads"


def put(text: str, name: str, content: str) -> str:
    """The text with `content` between the comments `name` and end."""
    before, begin, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{begin}{content}\n{end}{after}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, all columns but the first aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def newest() -> dict[str, Any]:
    """The newest result of `benchmarks.ops` of any machine."""
    paths = stored.RESULTS.glob("*/ops-2*.json")
    return max(map(stored.read, paths), key=lambda result: result["date"])


def names() -> list[str]:
    """The ops of `xformer.ops`."""
    return [name for name in dir(ops) if isinstance(getattr(ops, name), Overridable)]


def section(name: str, result: dict[str, Any]) -> str:
    """What there is of an op, in Markdown."""
    op = getattr(ops, name)
    formula = (inspect.getdoc(op) or "").partition("\n")[0]
    kernels = [
        f"{label} {', '.join(linked)}"
        for library, label in LABELS.items()
        if (linked := list(links(name, library)))
    ]
    what = "Forward, cache and its `backward`" if op.has_backward else "Source"
    lines = [
        f"### {name}\n",
        f"```text\n{formula}\n```\n",
        f"- {what}: [`{name}.py`](../xformer/ops/{name}.py)",
        f"- Derivation: [{name}](derivations/{name}.md)",
    ]
    if op.has_backward:
        lines += [
            f"- Proof by finite differences: `xformer gradcheck --only {name}`",
            f"- Proof to 50 digits (extra `digits`): `xformer gradcheck --digits 50 --only {name}`",
            "- Proof by the autograd of torch and JAX, if they are installed: "
            f"`pytest tests/test_gradients.py -k {name}`{case_of(name)}",
        ]
    if commands := list(kernel_tests(name)):
        lines.append(f"- Proof of the kernels against the reference: {', '.join(commands)}")
    lines.append(f"- Kernels: {'; '.join(kernels) or 'none, the reference runs'}")
    works = "forward and backward" if op.has_backward else "forward"
    compiled = ", ".join(links(name, "numba")) or "the reference, fused"
    spent = dict(zip(TIMES[1:], cells(name, result), strict=True))
    spent[TIMES[-1]] += f" ({compiled})"
    listed = ", ".join(f"{who} {ms}" for who, ms in spent.items() if ms)
    lines.append(
        f"- Milliseconds, {works}, for {sizes()[name]}; {machine(result)}; the fastest of ours "
        f"bold: {listed}\n"
    )
    return "\n".join(lines)


def kernel_tests(name: str) -> Iterator[str]:
    """The commands that compare the kernels of an op with its reference."""
    if any(any(links(name, library)) for library in LABELS if library != "numba"):
        yield f"`pytest tests/test_kernels.py -k {name}`"
    if any(links(name, "numba")):
        yield f'`pytest -k "{name} and (numba or program)"`'


@cache
def sizes() -> dict[str, str]:
    """The shapes of the arrays that `benchmarks.ops` gives to each op."""
    found = {}
    for case in measured.cases():
        given = zip(inspect.signature(case.op).parameters, case.args, strict=False)
        arrays = [(arg, x) for arg, x in given if x is not None]
        found[case.name] = ", ".join(f"{arg} ({', '.join(map(str, x.shape))})" for arg, x in arrays)
    return found


def case_of(name: str) -> str:
    """Where the catalogue has the cases of an op, if it has a function of that name."""
    line = functions().get(f"_{name}")
    source = f"[`_{name}`](../xformer/proofs/catalogue/ops.py)"
    return "" if line is None else f". What is compared: {source}"


@cache
def functions() -> dict[str, int]:
    """The functions of the catalogue of ops, with their lines."""
    body = ast.parse(inspect.getsource(catalogue)).body
    return {node.name: node.lineno for node in body if isinstance(node, ast.FunctionDef)}


def links(name: str, library: str) -> Iterator[str]:
    """Links to the files of an op's kernels for a library."""
    if library == "numba":
        file = "activations" if name in (*BUILT_IN, "softcap") else name
        files = [Path("numba", "kernels", f"{file}.py")]
    elif library in ("numpy", "cupy"):
        modules = [k.run.__module__ for k in getattr(ops, name).import_kernels(library)]
        files = [Path(*module.split(".")[2:]).with_suffix(".py") for module in modules]
        files += [file.with_suffix(".cu") for file in files]
    else:
        files = [Path(library, f"{name}.py")]
    for file in files:
        if (ROOT / "backends" / file).exists():
            path = Path("backends", file).as_posix()
            yield f"[`{path}`](../{path})"


def who_runs(name: str, library: str) -> str:
    """What computes an op on a library, and in which dtypes besides float32 and float64."""
    if not any(links(name, library)):
        return "reference"
    if library == "numba":
        return "kernel, float32"
    if library not in ("numpy", "cupy"):  # no others have storage dtypes, or need the library
        return "kernel"
    stored = sorted(getattr(ops, name).stored_by(library))
    return ", ".join(["kernel", *(f"+ {dtype}" for dtype in stored)])


def milliseconds(name: str, result: dict[str, Any]) -> dict[str, float]:
    """The least milliseconds of an op, by contestant."""
    of_op: dict[str, float] = {}
    for contestant in result["rows"]:
        for work in (measured.BOTH, measured.FORWARD):
            if (summary := contestant.get(f"{name}: {work}")) is not None:
                of_op[contestant["name"]] = summary["min_ms"]
                break
    if not set(OURS) <= set(of_op):
        raise ValueError(f"{name}: the newest result lacks it: run `python -m benchmarks.ops`")
    return of_op


def ratio(name: str, result: dict[str, Any]) -> str:
    """The time of torch over the least time of ours; empty if torch has no such function."""
    of_op = milliseconds(name, result)
    least = min(of_op[contestant] for contestant in OURS)
    return f"{of_op[measured.PEER] / least:.2f}" if measured.PEER in of_op else ""


def cells(name: str, result: dict[str, Any]) -> list[str]:
    """Milliseconds of torch and of ours, of which the least is bold."""
    of_op = milliseconds(name, result)
    least = min(of_op[contestant] for contestant in OURS)
    shown = {who: report.digits(ms) for who, ms in of_op.items()}
    ours = [f"**{shown[who]}**" if of_op[who] == least else shown[who] for who in OURS]
    return [shown.get(measured.PEER, ""), *ours]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
