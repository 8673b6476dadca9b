"""A time limit for the code of a learner."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SLACK = 5.0  # seconds more for code that catches every exception


class TimeUp(BaseException):
    """Raised in code that runs too long. No Exception, which that code may catch."""


@contextmanager
def limited(seconds: float | None, what: str, path: Any) -> Iterator[None]:
    """A context in which code that runs longer than `seconds` is stopped: TimeoutError.

    what: the name of the code, for the message
    path: its file; the message names the last line in it
    seconds: None: no limit

    Code that no exception stops, as in one endless call of NumPy, ends the process with status 1 a
    few seconds later. So does all code on Windows and outside the main thread. Its traceback is
    then on stderr.
    """
    if seconds is None:
        yield
        return
    is_main = threading.current_thread() is threading.main_thread()
    raises = is_main and hasattr(signal, "setitimer")
    line = 0

    def stop(_: int, frame: Any) -> None:
        nonlocal line
        while frame is not None and frame.f_code.co_filename != str(path):
            frame = frame.f_back
        line = frame.f_lineno if frame is not None else line
        raise TimeUp

    faulthandler.dump_traceback_later(seconds + SLACK * raises, exit=True, file=2)
    before: Any = None
    if raises:
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, if the code catches it
    try:
        yield
    except TimeUp:
        where = f" (line {line})" if line else ""
        raise TimeoutError(
            f"{what} still runs after {seconds:g} s{where}: is there a loop without an end?"
        ) from None
    finally:
        if raises:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def threads_limited(seconds: float | None, what: str) -> Iterator[None]:
    """A context that waits for the threads that are begun in it, for `seconds` altogether.

    what: the name of the code that begins them, for the message
    seconds: None: no limit

    If one of them still runs, a warning says so, and the process ends with status 1 a second
    later: Python would wait for it for ever. The traceback of each thread is then on stderr.
    """
    before = set(threading.enumerate())
    try:
        yield
    finally:
        end = time.monotonic() + (seconds or 0)
        left = [one for one in threading.enumerate() if one not in before and not one.daemon]
        for thread in left if seconds is not None else ():
            thread.join(max(0, end - time.monotonic()))
            if thread.is_alive():
                faulthandler.dump_traceback_later(1, exit=True, file=2)
                message = f"{what}: a thread still runs after {seconds:g} s, and is stopped"
                warnings.warn(message, stacklevel=1)
