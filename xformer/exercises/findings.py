"""The results of the check of an exercise, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from xformer.exercises.exercise import Exercise

MOST = 5  # explanations that are printed


class Finding(NamedTuple):
    """The result for one output or gradient on one library. says: what is wrong; empty if right."""

    row: str
    library: str
    case: str
    says: str


class Grade(NamedTuple):
    """The findings of an exercise, and hints by row.

    libraries: the names of the array libraries that it ran on.
    """

    exercise: Exercise
    libraries: tuple[str, ...]
    findings: tuple[Finding, ...]
    hints: Mapping[str, tuple[str, ...]]

    @property
    def ok(self) -> bool:
        """Whether everything is right on every library."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings that are not right."""
        return tuple(finding for finding in self.findings if finding.says)

    def __str__(self) -> str:
        rows = list(dict.fromkeys(finding.row for finding in self.findings))
        width = max(map(len, rows))
        lines = ["  ".join([" " * width, *self.libraries])]
        for row in rows:
            cells = [self._cell(row, name).rjust(len(name)) for name in self.libraries]
            lines.append("  ".join([row.ljust(width), *cells]))
        return "\n".join([*lines, *self._explained(rows)])

    def _cell(self, row: str, library: str) -> str:
        texts = [f.says for f in self.findings if (f.row, f.library) == (row, library)]
        return "wrong" if any(texts) else "ok" if texts else "-"

    def _explained(self, rows: list[str]) -> Iterator[str]:
        """What is wrong: the first finding on each library, and hints. Equal texts are joined."""
        texts: dict[str, list[str]] = {}
        for row in rows:
            first: dict[str, Finding] = {}
            for finding in self.wrong:
                if finding.row == row:
                    first.setdefault(finding.library, finding)
            by_text: dict[tuple[str, str], list[str]] = {}
            for library, finding in first.items():
                by_text.setdefault((finding.says, finding.case), []).append(library)
            lines = [
                f"  {says}\n    case {case}, on {', '.join(on)}"
                for (says, case), on in by_text.items()
            ]
            lines += [f"  hint: {hint}" for hint in self.hints.get(row, ())]
            if lines:
                texts.setdefault("\n".join(lines), []).append(row)
        for text, same in list(texts.items())[:MOST]:
            yield f"\n{', '.join(same)} wrong:\n{text}"
        if len(texts) > MOST:
            yield f"\nand {sum(map(len, list(texts.values())[MOST:]))} more"
