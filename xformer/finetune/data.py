"""Records to train on: lines of text, or of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

JSON = (".jsonl", ".ndjson", ".json")
LABEL = "label"  # the one field that need not be text

T = TypeVar("T")


class Record(NamedTuple):
    """One line of a file, and where it stands."""

    where: str
    fields: dict[str, Any]


def read(path: str | os.PathLike[str], fields: Sequence[str] = ("text",)) -> list[Record]:
    """The records of a UTF-8 file, all with these fields: texts, and the number or name `label`.

    A file called .jsonl has a JSON object in each line, whose other fields do not matter. Of any
    other file each line is a text. Empty lines are left out. FileNotFoundError where there is no
    file, ValueError that names the line where one is not such, and where there is none.
    """
    place = Path(path)
    if not place.is_file():
        raise FileNotFoundError(f"there is no file {place}")
    is_json = place.suffix.lower() in JSON
    if not is_json and tuple(fields) != ("text",):
        wanted = ", ".join(fields)
        raise ValueError(f"{place}: must be a .jsonl file of objects with {wanted}")
    found = []
    for where, line in _lines(place):
        try:
            found.append(Record(where, _fields(line, fields) if is_json else {"text": line}))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from error
    if not found:
        raise ValueError(f"{place}: there is nothing in it to train on")
    return found


def first_fields(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Names of the fields of a file's first record; errors as `read`."""
    place = Path(path)
    if place.suffix.lower() not in JSON:
        return ("text",)
    if not place.is_file():
        raise FileNotFoundError(f"there is no file {place}")
    for where, line in _lines(place):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from error
        return tuple(found) if isinstance(found, dict) else ()
    return ()


def split(items: Sequence[T], share: float, seed: int = 0) -> tuple[list[T], list[T]]:
    """Items to train on, and a share of them, chosen at random, to validate on: at least one.

    A share of 0: none. ValueError where there are not enough of both.
    """
    if not 0 <= share < 1:
        raise ValueError(f"split: share must lie in [0, 1), got {share}")
    n = max(1, round(share * len(items))) if share else 0
    if n >= len(items):
        raise ValueError(f"split: {len(items)} examples are too few to keep {n} for validation")
    order = np.random.default_rng(seed).permutation(len(items))
    return [items[i] for i in sorted(order[n:])], [items[i] for i in sorted(order[:n])]


def _lines(place: Path) -> Iterator[tuple[str, str]]:
    """The lines that are not empty, and where they stand."""
    with place.open("rb") as file:
        for i, raw in enumerate(file, start=1):
            where = f"{place}: line {i}"
            try:
                line = raw.decode("utf-8-sig" if i == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: must be UTF-8, {error}") from error
            if line.strip():
                yield where, line.rstrip("\r\n")


def _fields(line: str, names: Sequence[str]) -> dict[str, Any]:
    """The named fields of a JSON object."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is no valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"must be a JSON object, got {type(data).__name__}")
    for name in names:
        if name not in data:
            raise ValueError(f"lacks {name!r}, it has {_listed(data)}")
        if name != LABEL and (not isinstance(data[name], str) or not data[name]):
            raise ValueError(f"{name} must be a text that is not empty, got {data[name]!r:.60}")
    return {name: data[name] for name in names}


def _listed(data: dict[str, Any]) -> str:
    return ", ".join(map(repr, data))[:200] or "nothing"
