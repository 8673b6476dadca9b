"""The picture of the rooms in docs/README.md, and the lines that it links, made from the code.

    python tools/rooms.py

A room is a folder of `xformer/`. It stands above all rooms that it imports from, in any of its
files. The command writes the picture between two lines of docs/README.md. RuntimeError if rooms
import each other in a circle.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "README.md"
BEGIN, END = "<!-- made by tools/rooms.py -->\n", "<!-- end -->\n"


def rooms(root: Path = ROOT) -> dict[str, list[Path]]:
    """Name of each room -> its files."""
    folders = sorted(path.parent for path in (root / "xformer").glob("*/__init__.py"))
    return {folder.name: sorted(folder.resolve().rglob("*.py")) for folder in folders}


def imports(file: Path) -> Iterator[str]:
    """The rooms that a file imports from, anywhere in it but for type checkers."""
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (n.name.split(".")[1] for n in node.names if n.name.startswith("xformer."))
        elif isinstance(node, ast.ImportFrom) and node.module == "xformer":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xformer."):
            yield str(node.module).split(".")[1]
        inside = ast.iter_child_nodes(node)
        waiting.extend(n for n in inside if isinstance(n, ast.stmt | ast.excepthandler))


def levels(known: dict[str, list[Path]]) -> list[list[str]]:
    """The rooms from the lowest on: each imports only from rooms of earlier lists."""
    used = {
        name: {room for file in files for room in imports(file)} & known.keys() - {name}
        for name, files in known.items()
    }
    sorter = TopologicalSorter(used)
    try:
        sorter.prepare()
    except CycleError as error:
        raise RuntimeError(f"rooms import each other: {' -> '.join(error.args[1])}") from None
    found = []
    while sorter.is_active():
        found.append(sorted(sorter.get_ready()))
        sorter.done(*found[-1])
    return found


def picture(root: Path = ROOT) -> str:
    """A table with a row for each room, from the highest to the lowest."""
    known = rooms(root)
    rows = ["| | room | what it holds |", "|---:|---|---|"]
    for level, names in reversed([*enumerate(levels(known))]):
        for name in names:
            init = (root / "xformer" / name / "__init__.py").read_text(encoding="utf-8")
            holds = (ast.get_docstring(ast.parse(init)) or "").splitlines()[0].removesuffix(".")
            folder = "backends" if name == "backends" else f"xformer/{name}"
            rows.append(f"| {level} | [`{folder}/`](../{folder}) | {holds} |")
    return "\n".join(rows) + "\n"


def line_of(file: Path, name: str) -> int:
    """The line of a function or class of a file, `name`, or of a method, "Class.method"."""
    nodes: Any = ast.parse(file.read_text(encoding="utf-8"))
    for part in name.split("."):
        nodes = next(n for n in nodes.body if getattr(n, "name", None) == part)
    return int(nodes.lineno)


def written(page: str) -> str:
    """The page with the picture of today, and the lines of today in its links to names."""

    def link(found: re.Match[str]) -> str:
        name, path = found.groups()
        return f"[`{name}`]({path}#L{line_of((PAGE.parent / path).resolve(), name)})"

    before, _, rest = page.partition(BEGIN)
    page = before + BEGIN + picture() + END + rest.partition(END)[2]
    return re.sub(r"\[`([\w.]+)`\]\((\.\./[\w/]+\.py)#L\d+\)", link, page)


def main() -> None:
    """Write the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
