"""A folder that one process at a time writes to."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # what the systems say of one that is


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder; BlockingIOError where another process does, OSError where none can.

    what: it does there, for the error.

    The system lets go of it when the process ends, however it ends.
    """
    with (folder / LOCK).open("ab") as file:
        try:
            _lock(file.fileno())
        except OSError as error:
            if error.errno not in HELD:
                why = f"cannot be locked: {error.strerror}"
                raise OSError(error.errno, why, str(folder)) from error
            raise BlockingIOError(f"{folder} is in use: another process {what} there") from error
        yield


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
