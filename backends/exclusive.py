"""A lock for short changes of shared data in a program whose signal handlers may compute too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Exclusive:
    """Run one change at a time.

    Another thread waits. A signal handler that interrupts a change on its own thread cannot wait
    for it, so its change is refused.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # hold it to read the data that the changes write
        self._is_changing = False

    def run(self, change: Callable[..., bool], *args: Any) -> bool:
        """Return change(*args), or False if the change is refused."""
        with self.lock:
            if self._is_changing:
                return False
            self._is_changing = True
            try:
                return change(*args)
            finally:
                self._is_changing = False
