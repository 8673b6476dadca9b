"""Progress of long work: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

from xformer.base.printing import size
from xformer.training.texts import Progress

PATIENCE = 2.0  # seconds before anything is shown
EVERY = 10.0  # seconds between lines
BYTES = "B"
WIDTH = 80  # columns of a terminal that does not report them
SHORTEST = 3  # columns of a bar

T = TypeVar("T")


@contextmanager
def progress(unit: str = BYTES) -> Iterator[Progress]:
    """A context that yields `report(what, done, total)`: the work's name, done and total bytes.

    unit: what is counted instead of bytes. Nothing is shown in the first `PATIENCE` seconds.
    """
    shown = _Bars(unit) if sys.stderr.isatty() else _Lines(unit)
    try:
        yield shown
    finally:
        shown.close()


def each(items: Sequence[T], what: str, unit: str) -> Iterator[T]:
    """Yield the items, and show how many are done. what: the work's name. unit: of the items."""
    with progress(unit) as report:
        report(what, 0, len(items))
        for done, item in enumerate(items, start=1):
            yield item
            report(what, done, len(items))


class Bar:
    """A line on a terminal: a name, a bar, and `parts`. It fits the terminal's width.

    total: the number of steps, of which `done` are done
    name: stands before the bar
    parts: stand behind it; where the terminal is narrow, the last ones are left out
    options: of tqdm
    """

    def __init__(
        self, total: int, done: int, name: str, parts: Sequence[str] = (), **options: Any
    ) -> None:
        ncols = _columns()
        options |= {"bar_format": _format(name, parts, ncols), "ncols": ncols}
        # tqdm shows no bar on a terminal that reports no rows.
        self.tqdm = tqdm(total=total, initial=done, file=sys.stderr, nrows=20, **options)

    def show(self, done: int, name: str, parts: Sequence[str] = ()) -> None:
        """Show that `done` steps are done; if little time has passed, with one of the next."""
        self.tqdm.ncols = _columns()
        self.tqdm.bar_format = _format(name, parts, self.tqdm.ncols)
        self.tqdm.update(done - self.tqdm.n)

    def close(self) -> None:
        """Show the last step, and end the line."""
        self.tqdm.close()


def _format(name: str, parts: Sequence[str], columns: int) -> str:
    """A `bar_format` of tqdm. Names and parts hold no braces, but for fields of tqdm."""
    free_columns = columns - len(name) - len(" ||") - SHORTEST
    shown = ""
    for part in parts:
        more = f"{shown}, {part}" if shown else f" {part}"
        if len(more) > free_columns:
            break
        shown = more
    return f"{name} |{{bar}}|{shown}"


def _columns() -> int:
    """The columns of the terminal but one: a cursor behind the last one may begin a new line."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # it is no terminal
        columns = 0
    return (columns or WIDTH) - 1


class _Bars:
    """A bar for each piece of work."""

    def __init__(self, unit: str) -> None:
        self.unit, self.what = unit, ""
        self.bar: Bar | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        sizes = tuple(map(tqdm.format_sizeof, (done, total)))
        amount = "{}/{}B".format(*sizes) if self.unit == BYTES else f"{done}/{total} {self.unit}"
        line = f"{what}: {100 * done // max(total, 1)}%", [amount, "{remaining} left"]
        if self.bar is None or self.what != what:
            self.close()
            self.what, self.bar = what, Bar(total, 0, *line, leave=False, delay=PATIENCE)
        self.bar.show(done, *line)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class _Lines:
    """Lines of progress on stderr, for a log."""

    def __init__(self, unit: str) -> None:
        self.unit, self.what, self.start, self.next = unit, "", 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if what != self.what:
            self.what, self.start, self.next = what, now, now + PATIENCE
        if now >= self.next and done:
            left = (now - self.start) / done * (total - done)
            amount = f"{done:,} of {total:,} {self.unit}"
            if self.unit == BYTES:
                amount = f"{size(done)} of {size(total)}"
            print(f"{what}: {amount}, {left:.0f} s left", file=sys.stderr, flush=True)
            self.next = now + EVERY

    def close(self) -> None:
        pass
