"""Tables of text."""

from __future__ import annotations

from collections.abc import Collection, Iterable

Row = tuple[str, ...]


def table(rows: Iterable[Row], right: Collection[int] | None = None) -> str:
    """The rows as lines of aligned columns.

    right: indices of the columns that are aligned on the right (default: all but the first)
    """
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = range(1, len(widths)) if right is None else right
    aligned = (
        [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)
