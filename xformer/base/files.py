"""Write files and folders atomically: each is complete at its final path, or absent."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

PART = re.compile(r"\..+\.[0-9a-f]{8}\.part")  # names of `replacing`
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a write raises these without a path
TEMPORARY = re.compile(r"\.tmp[0-9A-Za-z]{6}")  # names that safetensors writes to first


@contextmanager
def replacing(*targets: Path) -> Iterator[list[Path]]:
    """Yield temporary paths to write to; on exit they replace `targets`, in the order given.

    targets: files of one folder; the temporary paths are in the same folder.

    Each file is flushed to the disk before it is renamed. If the body raises, the targets are
    unchanged, and the temporary files are deleted. OSError for a device or a pipe as a target.
    """
    for target in targets:
        if target.exists() and not (target.is_file() or target.is_dir()):
            raise OSError(f"{target} is a device or a pipe, which no file can replace")
    parts = [t.with_name(f".{t.name}.{os.urandom(4).hex()}.part") for t in targets]
    try:
        yield parts
        for part in parts:
            _sync(part)
        for part, target in zip(parts, targets, strict=True):
            os.replace(part, target)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            _sync(targets[0].parent)
    except OSError as error:
        for part, target in zip(parts, targets, strict=True):
            _name(error, part, target)
        raise
    finally:
        for part in parts:
            with suppress(OSError):  # the error that is raised says more
                part.unlink(missing_ok=True)


def require_readable(path: Path) -> None:
    """Raise PermissionError if `path` exists and may not be read.

    safetensors would say that there is no file.
    """
    if path.exists() and not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def remove_parts(folder: Path) -> None:
    """Remove files that a killed process has left half-written in a folder, if it exists.

    Only files with a name that `replacing` or safetensors makes are removed.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if (PART.fullmatch(path.name) or TEMPORARY.fullmatch(path.name)) and path.is_file():
            path.unlink()


def aside(path: Path) -> Path:
    """Return an unused path in the folder of `path`: `NAME.aside`, `NAME.aside-2`, ...

    The caller moves a file there that is no longer in use, but must not be lost.
    """
    numbers = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    names = (path.with_name(f"{path.name}.aside{number}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


def require_new(folder: Path) -> None:
    """Raise FileExistsError if `folder` is a file, or a folder that is not empty."""
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is in use; name a new folder")


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """Yield a temporary folder to write files to; on exit it is renamed to `target`.

    The files are flushed to the disk before the rename. If the body raises, the temporary folder
    is deleted, and `target` is not made.

    Raises FileExistsError if `target` is a file, or a folder that is not empty.
    """
    import shutil  # it takes long to import, and a process that only reads does not need it

    require_new(target)
    target = target.absolute()
    part = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
    try:
        part.mkdir(parents=True)
        yield part
        for path in part.iterdir():
            _sync(path)
        if target.exists():
            target.rmdir()
        os.rename(part, target)
        if os.name == "posix":
            _sync(target.parent)
    except OSError as error:
        _name(error, part, target)
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _name(error: OSError, part: Path, target: Path) -> None:
    """Let an error about the temporary path, or about a write without a name, name the target."""
    if error.filename is None and error.errno in NO_ROOM:
        error.filename = str(target)
    elif isinstance(error.filename, str | Path):
        error.filename = str(error.filename).replace(str(part), str(target))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_layout(array: np.ndarray) -> np.ndarray:
    """The array as files hold it: in C order and little-endian. A copy only if it is not."""
    import numpy as np

    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def write_arrays(
    arrays: Mapping[str, np.ndarray], part: Path, target: Path, metadata: dict[str, str]
) -> None:
    """Write a safetensors file at `part`, which becomes `target`. OSError if that fails.

    arrays: of any memory order and byte order

    It gets the permissions of other new files; safetensors gives access only to the owner.
    """
    import safetensors
    from safetensors.numpy import save_file

    part.touch()
    mode = part.stat().st_mode
    # save_file stores the memory of an array as if it were in C order.
    stored = {name: file_layout(array) for name, array in arrays.items()}
    try:
        save_file(stored, part, metadata=metadata)
    except safetensors.SafetensorError as error:  # its error for a full disk
        raise OSError(f"{target} cannot be written: {error}") from error
    part.chmod(stat.S_IMODE(mode))
