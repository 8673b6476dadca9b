"""Ctrl-C that ends training cleanly, and at once when it is pressed again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible(message: str = "") -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed; a second time raises KeyboardInterrupt.

    message: for stderr when it is pressed. Outside the main thread, where signals do not arrive, it
    never was.
    """
    pressed = threading.Event()

    def on_interrupt(*_: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        os.write(2, message.encode())  # print may be at work already, and must not be called again

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
