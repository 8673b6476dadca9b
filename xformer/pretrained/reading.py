"""Files of unknown origin: opened only where it is safe, read only as far as a limit.

A model is a folder, and every file of it must lie in that folder. A symbolic link out of it is
refused, except in the Hub cache's own layout, where every downloaded model is made of such links:

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
MAX_DEPTH = 64  # of objects and lists in one another
LONG_NUMBER = re.compile(rf"[0-9]{{{DIGITS + 1}}}")
MESSAGE = 1000  # characters
POINTER = b"version https://git-lfs"  # the first bytes of what git stores in place of large files
PAGE = b"<!DOCTYPE HTML"


class PretrainedError(ValueError):
    """A file of a model is damaged, hostile or not supported; the message names it and what."""

    def __init__(self, message: str) -> None:
        # Parts of it may come from the file, by way of libraries: nothing that acts on a terminal.
        clean = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message[:MESSAGE])
        super().__init__(clean + "..." * (len(message) > MESSAGE))


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file, open for reading.

    FileNotFoundError where there is none, PretrainedError unless it is a regular file that lies in
    the folder that it is named in.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no file {path}")
    real = _inside(path)
    # A pipe or a device would hang, or act, on being opened: looked at before and, as it may have
    # been exchanged meanwhile, after.
    _require_regular(os.lstat(real), path)
    flags = os.O_RDONLY
    for flag in ("O_BINARY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
        flags |= getattr(os, flag, 0)
    with open(os.open(real, flags), "rb") as file:
        _require_regular(os.fstat(file.fileno()), path)
        _require_contents(file.peek(len(POINTER)), path)
        yield file


def read_bytes(path: Path, limit: int) -> bytes:
    """The contents of a file, refused as `opened` does and where it holds more than `limit`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise PretrainedError(f"{path}: at most {limit} bytes are read, it has {size}")
        return file.read(size)


def read_text(path: Path, limit: int) -> str:
    """As `read_bytes`, without a byte order mark; PretrainedError unless it is UTF-8."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PretrainedError(f"{path}: must be UTF-8, {error}") from error


def read_json(path: str | os.PathLike[str], limit: int = JSON_LIMIT) -> dict[str, Any]:
    """The JSON object in a file: UTF-8, no key twice, every number finite."""
    return parse_json(read_text(Path(path), limit), Path(path))


def read_json_list(path: str | os.PathLike[str], limit: int = JSON_LIMIT) -> list[Any]:
    """As `read_json`, the JSON array in a file."""
    data = _parsed(read_text(Path(path), limit), Path(path))
    if not isinstance(data, list):
        raise PretrainedError(f"{path}: must hold a JSON array, got {type(data).__name__}")
    return data


def parse_json(text: str, path: Path) -> dict[str, Any]:
    """The JSON object in `text`, which came from `path`."""
    data = _parsed(text, path)
    if not isinstance(data, dict):
        raise PretrainedError(f"{path}: must hold a JSON object, got {type(data).__name__}")
    if _deeper(data, MAX_DEPTH):  # than Python could copy or print
        raise PretrainedError(f"{path}: objects and lists lie more than {MAX_DEPTH} deep")
    return data


def _parsed(text: str, path: Path) -> Any:
    if LONG_NUMBER.search(text):  # Python would take long over it
        raise PretrainedError(f"{path}: no number may have more than {DIGITS} digits")
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_number, parse_float=_number
        )
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{path}: is no valid JSON: {error}") from error


def listed(names: Iterable[str]) -> str:
    """The first names, quoted as they came from a file, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(f"{name!r:.100}" for name in ordered[:5]) + more


def _inside(path: Path) -> Path:
    """The real place of `path`, which must lie in the folder that `path` names."""
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
    if start[: len(PAGE)].upper() == PAGE:
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
