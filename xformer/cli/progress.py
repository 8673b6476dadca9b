"""How far long work is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from xformer.cli.texts import PATIENCE
from xformer.training.texts import Progress

EVERY = 10.0  # seconds between lines


@contextmanager
def progress() -> Iterator[Progress]:
    """A function to call with what is done, how many bytes of it are, and of how many.

    Nothing is shown of work that takes less than `PATIENCE` seconds.
    """
    shown = _Bars() if sys.stderr.isatty() else _Lines()
    try:
        yield shown
    finally:
        shown.close()


class _Bars:
    """A bar for each piece of work."""

    def __init__(self) -> None:
        self.bar = tqdm(disable=True)

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.bar.disable or self.bar.desc != f"{what}: ":
            self.close()
            options = {"unit": "B", "unit_scale": True, "leave": False, "delay": PATIENCE}
            self.bar = tqdm(desc=what, total=total, **options)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        self.bar.close()


class _Lines:
    """Lines on stderr, for a log."""

    def __init__(self) -> None:
        self.what, self.start, self.next = "", 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if what != self.what:
            self.what, self.start, self.next = what, now, now + PATIENCE
        if now >= self.next and done:
            left = (now - self.start) / done * (total - done)
            amount = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
            print(f"{what}: {amount}, {left:.0f} s left", file=sys.stderr, flush=True)
            self.next = now + EVERY

    def close(self) -> None:
        pass
