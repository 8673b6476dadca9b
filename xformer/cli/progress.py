"""Progress of long work: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from xformer.training.texts import Progress

PATIENCE = 2.0  # seconds before anything is shown
EVERY = 10.0  # seconds between lines
BYTES = "B"

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


class _Bars:
    """A bar for each piece of work."""

    def __init__(self, unit: str) -> None:
        self.unit, self.bar = unit, tqdm(disable=True)

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.bar.disable or self.bar.desc != what:
            self.close()
            options = {"unit": self.unit, "unit_scale": self.unit == BYTES, "delay": PATIENCE}
            self.bar = tqdm(desc=what, total=total, leave=False, **options)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
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
                amount = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
            print(f"{what}: {amount}, {left:.0f} s left", file=sys.stderr, flush=True)
            self.next = now + EVERY

    def close(self) -> None:
        pass
