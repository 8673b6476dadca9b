"""Standard output and standard error of a command: what cannot be printed ends nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Output:
    """A text stream that never raises.

    Characters that the stream cannot encode are printed as Python escapes them: `\\xfc`. After an
    error of the system, as of a full disk or a closed pipe, `lost` is that error.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Print a text, or lose it."""
        try:
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                code = self.stream.encoding
                self.stream.write(text.encode(code, "backslashreplace").decode(code))
        except OSError as error:
            self.lost = error
        return len(text)

    def flush(self) -> None:
        """Hand what was printed to the system, or lose it."""
        try:
            self.stream.flush()
        except OSError as error:
            self.lost = error


@contextmanager
def printing() -> Iterator[Output]:
    """`sys.stdout` and `sys.stderr` are an `Output` inside, also where the process has none.

    Gives the `Output` of standard output.
    """
    _open_standard()
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as null:
        out, err = (Output(stream or null) for stream in before)
        sys.stdout, sys.stderr = out, err
        try:
            yield out
        finally:
            sys.stdout, sys.stderr = before
            for output in (out, err):
                _finish(output)


def is_lost() -> bool:
    """Whether standard output has failed, so that nobody reads what is printed."""
    return isinstance(sys.stdout, Output) and sys.stdout.lost is not None


def _open_standard() -> None:
    """Open the null device as each standard descriptor that is closed.

    Otherwise a file of ours would get its number, and what C code prints to 2 would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # as the lowest free number, which is this one


def _finish(output: Output) -> None:
    """Flush; where that fails, Python would try again as it exits, and complain."""
    output.flush()
    if output.lost is None:
        return
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, output.fileno())
        os.close(null)
    except OSError:  # no file of the system
        return
    output.flush()
