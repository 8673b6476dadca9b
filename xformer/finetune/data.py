"""Records to train on: lines of text, JSON objects, or rows of a table."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from xformer.training.lines import JSON as LINES
from xformer.training.lines import holds_json, lines, named, require_file

JSON = (*LINES, ".json")
TABLES = {".csv": ",", ".tsv": "\t"}  # suffix -> delimiter
LABEL = "label"  # a number or a name
SCORE = "score"  # a number in [0, 1]; in its place a record may have a label
LISTS = ("words", "tags")  # fields that are lists
WHOLE = re.compile(r"-?\d+")

T = TypeVar("T")


class Record(NamedTuple):
    """The fields of one record of a file."""

    where: str  # the file and the line, for messages
    fields: dict[str, Any]


def read(path: str | os.PathLike[str], fields: Sequence[str] = ("text",)) -> list[Record]:
    """The records of a UTF-8 file, which may be compressed (.gz). Empty lines are left out.

    path: a .jsonl or .ndjson file with a JSON object a line; a .json file with these or an array
        of objects; a .csv or .tsv table whose first row has the names; in any other file, each line
        is a text. Suffixes may be in any case.
    fields: the names of the fields to read. They are texts; `label` is a number or a name, `score`
        a number from 0 to 1, which may be called `label`, `words` a list of texts, `tags` a list of
        numbers or names. In a table labels are numbers if all of them are whole numbers.

    FileNotFoundError if there is no file. ValueError, which names the line, for a bad line, and if
    there is no record.
    """
    file = Path(path)
    require_file(file)
    if _kind(file) == "text" and tuple(fields) != ("text",):
        wanted = ", ".join(fields)
        raise ValueError(f"{file}: must be a .jsonl, .json or .csv file with {wanted}")
    records = []
    for where, data in _objects(file):
        try:
            records.append(Record(where, _fields(data, fields)))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not records:
        raise ValueError(f"{file}: there is nothing in it to train on")
    if _kind(file) in TABLES and LABEL in fields:
        labels = [record.fields[LABEL] for record in records]
        if all(WHOLE.fullmatch(label) for label in labels):
            for record in records:
                record.fields[LABEL] = int(record.fields[LABEL])
    return records


def first_fields(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of the fields of a file's first record.

    FileNotFoundError if there is no file, ValueError if its beginning is damaged.
    """
    file = Path(path)
    if _kind(file) == "text":
        return ("text",)
    require_file(file)
    data = next((data for _, data in _objects(file)), None)
    return tuple(data) if isinstance(data, dict) else ()


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


def _kind(file: Path) -> str:
    """The kind of a file by its name: "json", "text", or a suffix in `TABLES`."""
    if holds_json(file, JSON):
        return "json"
    return next((suffix for suffix in TABLES if holds_json(file, (suffix,))), "text")


def _objects(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (location, object) for each record. ValueError, with the location, for a bad one."""
    kind = _kind(file)
    if kind in TABLES:
        yield from _rows(file, TABLES[kind])
        return
    found = ((where, line) for where, line in lines(file) if line.strip())
    if kind == "text":
        yield from ((where, {"text": line}) for where, line in found)
        return
    for i, (where, line) in enumerate(found):
        is_array = i == 0 and line.lstrip().startswith("[")
        try:
            if is_array:
                rest = (line for _, line in found)
                data = json.loads("\n".join(itertools.chain([line], rest)))
            else:
                data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file if is_array else where}: is no valid JSON: {error}") from error
        yield from (
            ((f"{file}: item {n}", x) for n, x in enumerate(data, 1))
            if is_array
            else ((where, data),)
        )


def _rows(file: Path, delimiter: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (location, fields) for each row of a table after the row with the names."""
    reader = csv.reader((f"{line}\n" for _, line in lines(file)), delimiter=delimiter, strict=True)
    names: list[str] = []
    try:
        for row in reader:
            where = f"{file}: line {reader.line_num}"
            if not any(row):
                continue
            if not names:
                names = row
                if len(set(names)) < len(names):
                    raise ValueError(f"{where}: two columns have the same name: {', '.join(names)}")
            elif len(row) != len(names):
                raise ValueError(f"{where}: must have {len(names)} fields, got {len(row)}")
            else:
                yield where, dict(zip(names, row, strict=True))
    except csv.Error as error:
        hint = "; a .jsonl file may have longer ones" if "field limit" in str(error) else ""
        raise ValueError(f"{file}: line {reader.line_num}: {error}{hint}") from error


def _fields(data: Any, names: Sequence[str]) -> dict[str, Any]:
    """The named fields of an object. ValueError for a missing or an empty one."""
    by_label = SCORE in names and isinstance(data, dict) and SCORE not in data and LABEL in data
    found = named(data, [LABEL if by_label and name == SCORE else name for name in names])
    if by_label:
        found[SCORE] = found.pop(LABEL)
    for name in LISTS:
        if name in names and (not isinstance(found[name], list) or not found[name]):
            raise ValueError(f"{name} must be a list that is not empty, got {found[name]!r:.60}")
    for word in found.get("words", ()):
        if not isinstance(word, str) or not word:
            raise ValueError(f"words must be texts that are not empty, got {word!r:.60}")
    for name in names:
        if name not in (LABEL, SCORE, *LISTS) and (
            not isinstance(found[name], str) or not found[name]
        ):
            raise ValueError(f"{name} must be a text that is not empty, got {found[name]!r:.60}")
    if SCORE in names:
        value = found[SCORE]
        try:
            found[SCORE] = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found[SCORE] = math.nan
        if not 0 <= found[SCORE] <= 1:
            raise ValueError(f"{SCORE} must be a number from 0 to 1, got {value!r:.60}")
    return found
