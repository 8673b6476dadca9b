"""Files that take their place whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(*targets: Path) -> Iterator[list[Path]]:
    """Names beside `targets`, of one folder, to write to; they take the targets' places at the end.

    In the order given, and each is on the disk before it gets its name. After an error the targets
    are what they were and nothing lies beside them.
    """
    parts = [t.with_name(f".{t.name}.{secrets.token_hex(4)}.part") for t in targets]
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
