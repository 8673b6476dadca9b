"""Files and folders that take their place whole or not at all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(*targets: Path) -> Iterator[list[Path]]:
    """Names beside `targets`, of one folder, to write to; they take the targets' places at the end.

    In the order given, and each is on the disk before it gets its name. After an error the targets
    are what they were and nothing lies beside them.
    """
    parts = [t.with_name(f".{t.name}.{os.urandom(4).hex()}.part") for t in targets]
    try:
        yield parts
        for part in parts:
            _sync(part)
        for part, target in zip(parts, targets, strict=True):
            os.replace(part, target)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            _sync(targets[0].parent)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def aside(path: Path) -> Path:
    """An unused name beside a file, for what is no longer in use and not to be lost."""
    numbers = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    names = (path.with_name(f"{path.name}.aside{number}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


def require_new(folder: Path) -> None:
    """FileExistsError where there is such a file, or a folder that is not empty."""
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is in use; name a new folder")


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write files to; at the end it becomes `target`, whole.

    They are on the disk before. After an error nothing lies there. FileExistsError as
    `require_new`.
    """
    import shutil  # which takes long to import, and a process that reads needs none of it

    require_new(target)
    target = target.absolute()
    part = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
    part.mkdir(parents=True)
    try:
        yield part
        for path in part.iterdir():
            _sync(path)
        if target.exists():
            target.rmdir()
        os.rename(part, target)
        if os.name == "posix":
            _sync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
