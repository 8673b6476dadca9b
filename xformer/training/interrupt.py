"""Ctrl-C that ends training cleanly, and at once when it is pressed again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def interruptible(message: str = "") -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed; a second time raises KeyboardInterrupt.

    message: for stderr when it is pressed. Outside the main thread signals do not arrive, and the
    answer is always no. So it is where SIGINT is ignored, as by a shell's `command &`, or has a
    handler that is not Python's usual one; both are left as they are.
    """
    pressed = threading.Event()

    def on_interrupt(*_: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        if sys.__stderr__ is not None:  # else 2 may be the number of any file
            with suppress(OSError):  # not print, which may be at work already
                os.write(2, message.encode())

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed.is_set
        return
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
