"""The log of a run: one line with a JSON object for each step."""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xformer.base.files import aside, replacing
from xformer.training.loop import Step

LOG = "log.jsonl"
UNLOGGED = ("state", "processes", "measures")  # fields of a step that are no column


def numbers_of(step: Step) -> dict[str, Any]:
    """The numbers of a step, by column. Those that are not finite are None: JSON has none."""
    numbers = {name: value for name, value in step._asdict().items() if name not in UNLOGGED}
    numbers |= step.measures or {}
    for name, value in numbers.items():
        if isinstance(value, float) and not math.isfinite(value):
            numbers[name] = None
    return numbers


def line_of(step: Step) -> bytes:
    """The line of a step."""
    return json.dumps(numbers_of(step), allow_nan=False).encode() + b"\n"


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each line of an undamaged log; of none if there is no log."""
    if path.is_file():
        with path.open("rb") as lines:
            yield from map(json.loads, lines)


def append(log: io.FileIO, line: bytes) -> None:
    """Write a whole line. If that fails: OSError, and nothing of it stays in the file."""
    end = log.seek(0, os.SEEK_END)
    unwritten = line
    try:
        while unwritten:  # a full disk writes a part first, and raises only for the next part
            unwritten = unwritten[log.write(unwritten) :]
    except OSError:
        log.truncate(end)
        raise


def shorten(path: Path, step: int, most: int) -> None:
    """Remove the lines after `step`, which a killed process has left.

    Up to `most` lines and an incomplete one are removed. If there are more, or a line is damaged,
    the old log is kept under another name, and a UserWarning says so; the new log has the readable
    lines up to `step`.
    """
    if not path.is_file():
        return
    content = path.read_bytes()
    shortened, last, damaged = _parted(content, step)
    if damaged or last > step + most:
        why = f"ends with step {last}, but the run resumes after step {step}"
        why = f"is damaged in line {damaged}" if damaged else why
        old = aside(path)
        with replacing(old, path) as (copy, part):
            copy.write_bytes(content)
            part.write_bytes(shortened)
        warnings.warn(f"{path} {why}; the old log is kept: {old.name}", stacklevel=3)
    elif shortened != content:
        with replacing(path) as (part,):
            part.write_bytes(shortened)


def _parted(content: bytes, step: int) -> tuple[bytes, int, int]:
    """The lines up to `step`, the last step, and the number of the first damaged line or 0."""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n") and _step_of(lines[-1]) is None:
        lines.pop()  # its write was interrupted
    readable: list[bytes] = []
    last = damaged = 0
    for number, line in enumerate(lines, start=1):
        n = _step_of(line)
        if n is None or n <= last:
            damaged = damaged or number
            continue
        last = n
        if n <= step:
            readable.append(line.rstrip(b"\n") + b"\n")
    return b"".join(readable), last, damaged


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if the line is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None
