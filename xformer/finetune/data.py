"""Records to train on: lines of text, or of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from xformer.training.lines import JSON as LINES
from xformer.training.lines import fields as fields_of
from xformer.training.lines import holds_json, lines, require_file

JSON = (*LINES, ".json")
LABEL = "label"  # the one field that need not be text

T = TypeVar("T")


class Record(NamedTuple):
    """One line of a file, and where it stands."""

    where: str
    fields: dict[str, Any]


def read(path: str | os.PathLike[str], fields: Sequence[str] = ("text",)) -> list[Record]:
    """The records of a UTF-8 file, all with these fields: texts, and the number or name `label`.

    A file called .jsonl or .jsonl.gz, in any case, has a JSON object in each line, whose other
    fields do not matter. Of any other file each line is a text. Empty lines are left out.
    FileNotFoundError where there is no file, ValueError that names the line where one is not such,
    and where there is none.
    """
    place = Path(path)
    require_file(place)
    is_json = holds_json(place, JSON)
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
    if not holds_json(place, JSON):
        return ("text",)
    require_file(place)
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
    return ((where, line) for where, line in lines(place) if line.strip())


def _fields(line: str, names: Sequence[str]) -> dict[str, Any]:
    """The named fields of a JSON object."""
    data = fields_of(line, names)
    for name in names:
        if name != LABEL and (not isinstance(data[name], str) or not data[name]):
            raise ValueError(f"{name} must be a text that is not empty, got {data[name]!r:.60}")
    return data
