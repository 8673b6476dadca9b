"""Safe reading of files of unknown origin, with limits on their size.

A model is a folder, and all its files must be in that folder. A symbolic link to a file outside is
refused, except in the layout of the Hub cache, in which the files of a model are links:

    <repo>/snapshots/<revision>/file -> <repo>/blobs/<hash>
    <repo>/blobs/<hash> -> <cache>/blobs/<its first 2 digits>/<64 digits>    (blobs shared by repos)
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

JSON_LIMIT = 1 << 20  # bytes of a configuration
DIGITS = 400  # of a number
MAX_DEPTH = 64  # of nested objects and lists
LONG_NUMBER = re.compile(rf"[0-9]{{{DIGITS + 1}}}")
MESSAGE = 1000  # characters
POINTER = b"version https://git-lfs"  # the first bytes of what git stores in place of large files
PAGES = (b"<!DOCTYPE HTML", b"<HTML")


class PretrainedError(ValueError):
    """A file of a model is damaged, hostile or not supported. The message names the file."""

    def __init__(self, message: str) -> None:
        # Parts of the message may come from the file: remove characters that control a terminal.
        clean = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message[:MESSAGE])
        super().__init__(clean + "..." * (len(message) > MESSAGE))


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A context with the file, open for reading.

    FileNotFoundError if there is no file. PretrainedError unless it is a regular file in the folder
    of `path`.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no file {path}")
    real = _inside(path)
    # Opening a pipe or a device would hang or have an effect, so the file is checked before. It is
    # checked again after, as it may have been replaced in between.
    _require_regular(os.lstat(real), path)
    flags = os.O_RDONLY
    for flag in ("O_BINARY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
        flags |= getattr(os, flag, 0)
    with open(os.open(real, flags), "rb") as file:
        _require_regular(os.fstat(file.fileno()), path)
        _require_contents(file.peek(len(POINTER)), path)
        yield file


def read_bytes(path: Path, limit: int) -> bytes:
    """The bytes of a file. Raises as `opened` does, and PretrainedError for more than `limit`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise PretrainedError(f"{path}: at most {limit} bytes are read, it has {size}")
        return file.read(size)


def read_text(path: Path, limit: int) -> str:
    """The text of a file without a byte order mark.

    Raises as `read_bytes` does, and PretrainedError unless it is UTF-8.
    """
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PretrainedError(f"{path}: must be UTF-8, {error}") from error


def read_json(path: str | os.PathLike[str], limit: int = JSON_LIMIT) -> dict[str, Any]:
    """The JSON object in a file. It must be UTF-8, without repeated keys or non-finite numbers."""
    return parse_json(read_text(Path(path), limit), Path(path))


def read_json_list(path: str | os.PathLike[str], limit: int = JSON_LIMIT) -> list[Any]:
    """The JSON array in a file, with the same restrictions as for `read_json`."""
    data = _parsed(read_text(Path(path), limit), Path(path))
    if not isinstance(data, list):
        raise PretrainedError(f"{path}: must hold a JSON array, got {type(data).__name__}")
    return data


def parse_json(text: str, path: Path) -> dict[str, Any]:
    """The JSON object in `text`. path: its file, for messages."""
    data = _parsed(text, path)
    if not isinstance(data, dict):
        raise PretrainedError(f"{path}: must hold a JSON object, got {type(data).__name__}")
    if _deeper(data, MAX_DEPTH):  # Python could not copy or print it
        raise PretrainedError(f"{path}: objects and lists lie more than {MAX_DEPTH} deep")
    return data


def _parsed(text: str, path: Path) -> Any:
    if LONG_NUMBER.search(text):  # Python would take long to parse it
        raise PretrainedError(f"{path}: no number may have more than {DIGITS} digits")
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_number, parse_float=_number
        )
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{path}: is no valid JSON: {error}") from error


def listed(names: Iterable[str]) -> str:
    """Text: the first five names, quoted, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(f"{name!r:.100}" for name in ordered[:5]) + more


def _inside(path: Path) -> Path:
    """The real path of `path`. PretrainedError unless it is in the folder of `path`."""
    try:
        folder = Path(os.path.realpath(path.parent, strict=True))
        real = Path(os.path.realpath(path, strict=True))
    except OSError as error:
        raise PretrainedError(f"{path}: leads nowhere: {error.strerror}") from error
    if not real.is_relative_to(folder) and not _in_hub_cache(folder, real):
        raise PretrainedError(f"{path}: must lie in its folder, it is a link to {real}")
    return real


def _in_hub_cache(folder: Path, real: Path) -> bool:
    for above in folder.parents:
        if above.name == "snapshots":
            repo = above.parent
            shared = repo.parent / "blobs" / real.name[:2]
            of_cache = real.parent == shared and re.fullmatch("[0-9a-f]{64}", real.name)
            return real.parent == repo / "blobs" or bool(of_cache)
    return False


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise PretrainedError(f"{path}: must be a regular file, it is a {_kind(status.st_mode)}")


def _require_contents(start: bytes, path: Path) -> None:
    if start.startswith(POINTER):
        raise PretrainedError(
            f"{path}: is a git-lfs pointer, not the file itself; fetch it: `git lfs pull` in its "
            "folder"
        )
    if start and not any(start):
        raise PretrainedError(
            f"{path}: begins with zeros, as a download that was stopped; download it again"
        )
    if start[:100].lstrip().upper().startswith(PAGES):
        raise PretrainedError(f"{path}: is a web page, not the file itself; download it again")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "folder",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
        stat.S_IFLNK: "link",
    }
    return kinds.get(stat.S_IFMT(mode), "special file")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"keys given twice: {listed(k for k in counts if counts[k] > 1)}")
    return data


def _deeper(data: Any, depth: int) -> bool:
    level = [data]
    for _ in range(depth):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
    return bool(level)


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"a number must be finite, got {text:.60}")
    return value
