"""Ctrl-C: the first one ends training after the current step, the second one at once."""

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
    """A context that yields a function, which returns whether Ctrl-C was pressed.

    The second Ctrl-C raises KeyboardInterrupt.

    message: printed on stderr at the first Ctrl-C

    The answer is always False outside the main thread, which gets no signals; if SIGINT is ignored,
    as by a shell's `command &`; and if SIGINT has a handler that is not Python's default. Both are
    then left unchanged.
    """
    pressed = threading.Event()

    def on_interrupt(*_: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        if sys.__stderr__ is not None:  # otherwise descriptor 2 may be another file
            with suppress(OSError):  # not print, which the signal may have interrupted
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
