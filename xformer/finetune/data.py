"""Records to train on: lines of text, or JSON objects."""

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
LABEL = "label"  # the only field that may be a number
LISTS = ("words", "tags")  # fields that are lists

T = TypeVar("T")


class Record(NamedTuple):
    """The fields of one line of a file."""

    where: str  # the file and the line, for messages
    fields: dict[str, Any]


def read(path: str | os.PathLike[str], fields: Sequence[str] = ("text",)) -> list[Record]:
    """The records of a UTF-8 file. Empty lines are left out.

    path: a .jsonl or .jsonl.gz file (in any case) with a JSON object a line; in any other file,
        each line is a text
    fields: the names of the fields to read. They are texts; `label` is a number or a name, `words`
        a list of texts, `tags` a list of numbers or names.

    FileNotFoundError if there is no file. ValueError, which names the line, for a bad line, and if
    there is no record.
    """
    file = Path(path)
    require_file(file)
    is_json = holds_json(file, JSON)
    if not is_json and tuple(fields) != ("text",):
        wanted = ", ".join(fields)
        raise ValueError(f"{file}: must be a .jsonl file of objects with {wanted}")
    records = []
    for where, line in _lines(file):
        try:
            records.append(Record(where, _fields(line, fields) if is_json else {"text": line}))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from error
    if not records:
        raise ValueError(f"{file}: there is nothing in it to train on")
    return records


def first_fields(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of the fields of a file's first record.

    FileNotFoundError if there is no file, ValueError if the line is not valid JSON.
    """
    file = Path(path)
    if not holds_json(file, JSON):
        return ("text",)
    require_file(file)
    for where, line in _lines(file):
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from error
        return tuple(data) if isinstance(data, dict) else ()
    return ()


def split(items: Sequence[T], share: float, seed: int = 0) -> tuple[list[T], list[T]]:
    """Split items at random: those to train on, and those to validate on, each in the given order.

    share: the fraction to validate on, in [0, 1). If it is above 0, it is at least one item.
    ValueError if share is outside, or if no item would be left to train on.
    """
    if not 0 <= share < 1:
        raise ValueError(f"split: share must lie in [0, 1), got {share}")
    n = max(1, round(share * len(items))) if share else 0
    if n >= len(items):
        raise ValueError(f"split: {len(items)} examples are too few to keep {n} for validation")
    order = np.random.default_rng(seed).permutation(len(items))
    return [items[i] for i in sorted(order[n:])], [items[i] for i in sorted(order[:n])]


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """The lines that are not empty, each with its location for messages."""
    return ((where, line) for where, line in lines(file) if line.strip())


def _fields(line: str, names: Sequence[str]) -> dict[str, Any]:
    """The named fields of a JSON object. ValueError for a missing or an empty one."""
    data = fields_of(line, names)
    for name in LISTS:
        if name in names and (not isinstance(data[name], list) or not data[name]):
            raise ValueError(f"{name} must be a list that is not empty, got {data[name]!r:.60}")
    for word in data.get("words", ()):
        if not isinstance(word, str) or not word:
            raise ValueError(f"words must be texts that are not empty, got {word!r:.60}")
    for name in names:
        if name not in (LABEL, *LISTS) and (not isinstance(data[name], str) or not data[name]):
            raise ValueError(f"{name} must be a text that is not empty, got {data[name]!r:.60}")
    return data
