"""How parameters, caches and states print: one line each, and a table by name on request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

from xformer.base import tree

T = TypeVar("T")

LAYERS = ("blocks", "encoder", "decoder")


def short(cls: type[T]) -> type[T]:
    """Class decorator: `repr` is one line, and notebooks show a table.

    LanguageModelParams(2 blocks, 120,576 float32, 482.3 kB)
    """
    kind: Any = cls
    kind.__repr__, kind._repr_html_ = line, table_html
    return cls


def line(node: Any) -> str:
    """The type, the number of layers, of elements by dtype, and bytes."""
    arrays = list({id(array): array for array in _arrays(node).values()}.values())
    parts = [f"{n} {name}{'' if n == 1 else 's'}" for name, n in _layers(node)]
    elements = Counter[str]()
    for array in arrays:
        elements[_dtype(array)] += math.prod(array.shape)
    parts += [f"{n:,} {dtype}" for dtype, n in elements.items()]
    parts.append(size(tree.nbytes(arrays)) if arrays else "no arrays")
    return f"{type(node).__name__}({', '.join(parts)})"


def rows(node: Any) -> list[tuple[str, str, str, str]]:
    """(name, shape, dtype, size) of each leaf of a tree, as text.

    For an array: ("w", "4 x 8", "float32", "128 B"). For another leaf, whose `repr` is cut to 40
    characters: ("eps", "", "float", "1e-05").
    """
    listed = []
    for name, leaf in tree.flatten(node).items():
        leaf = tree.value(leaf)
        if _is_array(leaf):
            shape = " x ".join(map(str, leaf.shape)) or "()"
            listed.append((name, shape, _dtype(leaf), size(tree.nbytes([leaf]))))
        else:
            listed.append((name, "", type(leaf).__name__, f"{leaf!r:.40}"))
    return listed


def table(node: Any) -> str:
    """The `repr` of a tree, then a text table with name, shape, dtype and size of each leaf."""
    lines = [("name", "shape", "dtype", "size"), *rows(node)]
    widths = [max(len(row[i]) for row in lines) for i in range(4)]
    text = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in lines)
    return "\n".join([line(node), *(one.rstrip() for one in text)])


def table_html(node: Any) -> str:
    """The table as HTML, for notebooks."""
    import html

    cells = ("".join(f"<td>{html.escape(c)}</td>" for c in row) for row in rows(node))
    head = "<tr><th>name</th><th>shape</th><th>dtype</th><th>size</th></tr>"
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<p>{html.escape(line(node))}</p><table>{head}{body}</table>"


def size(nbytes: float) -> str:
    """A number of bytes as text, in decimal units: 999 B, 482.3 kB, 1.0 MB."""
    return scaled(nbytes, "B")


def scaled(amount: float, unit: str) -> str:
    """`amount` with a decimal prefix, `unit`, and from 1000 on one decimal place: 482.3 kB."""
    if amount < 999.5:
        return f"{amount:.0f} {unit}"
    for prefix in "kMGTP":
        amount /= 1000
        if amount < 999.95 or prefix == "P":  # 999.95 would be rounded to 1000.0
            break
    return f"{amount:,.1f} {prefix}{unit}"


def _arrays(node: Any) -> dict[str, Any]:
    leaves = {name: tree.value(leaf) for name, leaf in tree.flatten(node).items()}
    return {name: leaf for name, leaf in leaves.items() if _is_array(leaf)}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _layers(node: Any) -> Iterator[tuple[str, int]]:
    """The stacks of layers right below a node, or below its `stack`."""
    for part in (node, getattr(node, "stack", None)):
        for name in LAYERS:
            blocks = getattr(part, name, None)
            blocks = getattr(blocks, "blocks", blocks)
            if isinstance(blocks, tuple) and not hasattr(blocks, "_fields"):
                yield ("block" if name == "blocks" else f"{name} block"), len(blocks)
