"""Standard output and standard error of a command. A failed print does not end the command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

CONTROLS = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


class Output:
    """A text stream that never raises.

    Characters that the stream cannot encode are printed as Python escapes: `\\xfc`. After a system
    error, such as a full disk or a closed pipe, `lost` is that error.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Print `text`; after a system error, set `lost`. Return the length of `text`."""
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
        """Flush the stream; after a system error, set `lost`."""
        try:
            self.stream.flush()
        except OSError as error:
            self.lost = error


@contextmanager
def printing() -> Iterator[Output]:
    """A context in which `sys.stdout` and `sys.stderr` are an `Output`, even if they are closed.

    Yields the `Output` of standard output.
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


class _Notes(logging.Handler):
    """Prints what the library logs, such as that it compiles, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        print(f"xformer: {one_line(record.getMessage())}", file=sys.stderr)


@contextmanager
def notes() -> Iterator[None]:
    """A context in which the log of the library is printed; of several processes, by the first."""
    world = sys.modules.get("xformer.distributed.world")
    if world is not None and world.world().rank > 0:
        yield
        return
    log, handler = logging.getLogger("xformer"), _Notes()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def visible(text: str) -> str:
    """`text` for standard output: on a terminal with Python escapes for control characters.

    A model may write any of them, and a terminal obeys them. Newlines and tabs stay.
    """
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


def one_line(text: str) -> str:
    """`text` with Python escapes for control characters and newlines, which a path may have."""
    return text.translate(CONTROLS | {ord("\n"): "\\n", ord("\t"): "\\t"})


def end(message: str) -> None:
    """Print an error on stderr, and end the other processes of this command if there are any.

    There are none before `xformer.world` is imported.
    """
    world = sys.modules.get("xformer.distributed.world")
    if world is None:
        print(message, file=sys.stderr)
    else:
        world.end_all(message)


def is_lost() -> bool:
    """Whether standard output has failed, so that printing is useless."""
    return isinstance(sys.stdout, Output) and sys.stdout.lost is not None


def _open_standard() -> None:
    """Open the null device as each standard descriptor that is closed.

    Otherwise a file that is opened later would get its number, and C code that prints to
    descriptor 2 would write into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # as the lowest free number, which is this one


def _finish(output: Output) -> None:
    """Flush. If that fails, replace the descriptor, or Python's flush at exit would fail too."""
    output.flush()
    if output.lost is None:
        return
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, output.fileno())
        os.close(null)
    except OSError:  # the stream has no file descriptor
        return
    output.flush()
