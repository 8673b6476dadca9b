"""Changes that only one caller makes at a time, where signal handlers may compute too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Exclusive:
    """Another thread waits; a signal handler amid a change of the same thread is refused."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # to read what the changes write
        self._is_changing = False

    def run(self, change: Callable[..., bool], *args: Any) -> bool:
        """What change(*args) returns, or False if it is refused."""
        with self.lock:
            if self._is_changing:
                return False
            self._is_changing = True
            try:
                return change(*args)
            finally:
                self._is_changing = False
