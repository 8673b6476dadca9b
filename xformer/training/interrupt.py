"""Signals that end training: the first one after the current step, the second one at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Ctrl-C; the end of a job; a batch system's warning before it. Windows has no SIGUSR1.
SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n)]


@contextmanager
def interruptible(message: str = "") -> Iterator[Callable[[], bool]]:
    """A context that yields a function, which returns whether Ctrl-C was pressed.

    SIGTERM and SIGUSR1 have the same effect. The second signal raises KeyboardInterrupt.

    message: printed on stderr at the first signal

    The answer is always False outside the main thread, which gets no signals. A signal is left
    unchanged if it is ignored, as SIGINT by a shell's `command &`, and if it has a handler that is
    not the default.
    """
    received = threading.Event()

    def on_signal(*_: Any) -> None:
        if received.is_set():
            raise KeyboardInterrupt
        received.set()
        if sys.__stderr__ is not None:  # otherwise descriptor 2 may be another file
            with suppress(OSError):  # not print, which the signal may have interrupted
                os.write(2, message.encode())

    is_main = threading.current_thread() is threading.main_thread()
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {n: signal.getsignal(n) for n in SIGNALS if is_main}
    handled = {number: handler for number, handler in before.items() if handler in defaults}
    for number in handled:
        signal.signal(number, on_signal)
    try:
        yield received.is_set
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
