"""Files of lines: one JSON object a line, or parallel texts."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xformer.base.choices import near_path

JSON = (".jsonl", ".ndjson")  # suffixes of files with one JSON object a line


def holds_json(path: Path, suffixes: tuple[str, ...] = JSON) -> bool:
    """Whether a file's name ends with one of the suffixes, in any case, also before .gz."""
    return path.name.lower().removesuffix(".gz").endswith(suffixes)


def require_file(path: Path, what: str = "file") -> None:
    """FileNotFoundError if `path` does not exist, ValueError if it is not a file.

    A pipe is not a file: text is read more than once, to count it and to cut it.
    """
    if path.is_file():
        return
    if not path.exists():
        raise FileNotFoundError(f"there is no {what} {path}{near_path(path)}")
    if path.is_dir():
        raise ValueError(f"{path} must be a file, got a folder")
    raise ValueError(
        f"{path} must be a {what}, got a pipe or a device, which can be read only once: "
        "save its text to a file"
    )


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (location, line) for each line of a UTF-8 file, without its line end.

    The location is "PATH: line N", for error messages. A .gz file is decompressed. A byte order
    mark is removed.

    ValueError, with the location, if a line is not UTF-8. ValueError, with the path, if a .gz file
    is damaged.
    """
    where = str(path)
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for i, raw in enumerate(file, start=1):
                where = f"{path}: line {i}"
                line = raw.decode("utf-8-sig" if i == 1 else "utf-8")
                yield where, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: must be UTF-8, {error}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: is damaged: {error}") from error


def fields(line: str, names: Sequence[str]) -> dict[str, Any]:
    """The named fields of the JSON object in a line. ValueError if one is missing."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is no valid JSON: {error}") from error
    return named(data, names)


def named(data: Any, names: Sequence[str]) -> dict[str, Any]:
    """The named fields of an object. ValueError if it is none, or if one is missing."""
    if not isinstance(data, dict):
        raise ValueError(f"must be a JSON object, got {type(data).__name__}")
    for name in names:
        if name not in data:
            listed = ", ".join(map(repr, data))[:200] or "nothing"
            raise ValueError(f"lacks {name!r}, it has {listed}")
    return {name: data[name] for name in names}


def parallel(
    source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> list[tuple[str, str]]:
    """Pairs of texts: line i of `source` and line i of `target`. Files are UTF-8, also .gz.

    Pairs with a blank text are left out. ValueError if the numbers of lines differ, if there is no
    pair, and if a file is damaged. OSError if a file cannot be read.
    """
    one, other = ([line for _, line in lines(Path(path))] for path in (source, target))
    if len(one) != len(other):
        raise ValueError(
            f"{source} and {target} must have the same number of lines, "
            f"got {len(one)} and {len(other)}"
        )
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.strip() and b.strip()]
    if not pairs:
        raise ValueError(f"{source} and {target} hold no pair of texts")
    return pairs
