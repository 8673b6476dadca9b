"""What an error of the system says, in the words of the user."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def in_words(error: Exception) -> str:
    """The message of an error. For an error of the system: which path, and what is wrong with it.

    Python says "[Errno 2] No such file or directory: 'x'".
    """
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    if not isinstance(error, OSError) or error.errno is None or error.strerror is None:
        return str(error) or type(error).__name__
    what = error.strerror.lower()
    return what if error.filename is None else _about(Path(os.fsdecode(error.filename)), error)


def _about(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        from xformer.checks import near_path

        return f"there is no file or folder {path}{near_path(path)}"
    if error.errno == errno.EISDIR:
        return f"{path} must be a file, it is a folder"
    if error.errno == errno.ENOTDIR:
        file = next((above for above in path.parents if above.is_file()), path)
        return f"{file} must be a folder, it is a file"
    return f"{path}: {(error.strerror or '').lower()}"
