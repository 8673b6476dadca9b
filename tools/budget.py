"""Count the lines of each room and compare them with the budget in budget.toml.

    python tools/budget.py [ROOT]

ROOT: a checkout; default: the one of this file. Prints a table of the rooms. Exits with 1 if a room
is above its budget, or if its budget is more than 2 % above its lines: a room that has shrunk gives
its lines back.
"""

from __future__ import annotations

import itertools
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ENDS = (".py", ".cu", ".cuh")
FOLDERS = ("xformer", "backends")
SPARE = 0.02  # of the lines


def count(root: Path, rooms: dict[str, dict[str, object]]) -> dict[str, int]:
    """The lines of each room. LookupError for a file that is in no room."""
    patterns = [(name, list(_expanded(room["files"]))) for name, room in rooms.items()]
    lines = dict.fromkeys(rooms, 0)
    for path in _sources(root):
        inside = path.relative_to(root).as_posix()
        name = next((n for n, known in patterns if any(_fits(inside, p) for p in known)), None)
        if name is None:
            raise LookupError(f"{inside} is in no room of budget.toml")
        lines[name] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def problems(lines: dict[str, int], rooms: dict[str, dict[str, object]]) -> list[str]:
    """A sentence for each room whose budget does not fit its lines."""
    found = []
    for name, room in rooms.items():
        budget = int(str(room["lines"]))
        if lines[name] > budget:
            found.append(f"{name}/ has {lines[name]:,} lines, {lines[name] - budget:,} too many")
        elif budget > lines[name] * (1 + SPARE):
            found.append(f"{name}/ has {lines[name]:,} lines; lower its budget of {budget:,}")
    return found


def _sources(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:  # xformer/backends is a link to backends
        for path in sorted((root / folder).rglob("*")):
            linked = any(parent.is_symlink() for parent in path.parents if parent != root)
            if path.suffix in ENDS and path.is_file() and not linked:
                yield path


def _expanded(patterns: object) -> Iterator[str]:
    """The patterns without braces: "a/{b,c}.py" is "a/b.py" and "a/c.py"."""
    for pattern in patterns:  # type: ignore[attr-defined]
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        yield from map("".join, itertools.product(*parts))


def _fits(path: str, pattern: str) -> bool:
    """As fnmatch, but only "**" crosses folders."""
    return fnmatch(path, pattern) and ("**" in pattern or path.count("/") == pattern.count("/"))


def main(root: Path) -> int:
    """Print the table and the problems; 1 if there are any."""
    rooms = tomllib.loads((root / "tools" / "budget.toml").read_text(encoding="utf-8"))
    lines = count(root, rooms)
    for name in rooms:
        print(f"{name:12} {lines[name]:7,} of {rooms[name]['lines']:7,}")
    print(f"{'all':12} {sum(lines.values()):7,}")
    wrong = problems(lines, rooms)
    for sentence in wrong:
        print(f"budget: {sentence}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[1]))
