"""The log of a run of `xformer train`: one JSON object a step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LOG = "log.jsonl"
NUMBERS = ("step", "loss", "norm", "lr", "tokens", "seconds")


class Log(NamedTuple):
    """The steps of a run, one after another; NaN where the run had none or wrote null."""

    name: str
    step: np.ndarray  # (N,), as the others
    loss: np.ndarray
    norm: np.ndarray
    lr: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    validation: np.ndarray


def read_log(run: str | os.PathLike[str]) -> Log:
    """The log of a run, given its folder or the file.

    A last line without its end is one that is being written, and left out. FileNotFoundError where
    there is no log, ValueError, with the line, where it is damaged or holds no step.
    """
    path = Path(run)
    if path.is_dir() or not path.exists():
        path = path / LOG
    if not path.is_file():
        raise FileNotFoundError(f"{run} is no run of xformer train: there is no {path}")
    lines = path.read_bytes().split(b"\n")[:-1]
    rows: list[dict[str, float]] = []
    for number, line in enumerate(lines, 1):
        row = _row(line, f"{path}, line {number}")
        if rows and row["step"] <= rows[-1]["step"]:
            raise ValueError(
                f"{path}, line {number}: steps must rise, got {row['step']:.0f} after "
                f"{rows[-1]['step']:.0f}"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no step yet")
    columns = (np.array([row[name] for row in rows]) for name in Log._fields[1:])
    return Log(path.parent.name or str(path.parent), *columns)


def _row(line: bytes, where: str) -> dict[str, float]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: must be a JSON object, {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: must be a JSON object, got {found!r:.60}")
    if missing := [name for name in NUMBERS if name not in found]:
        raise ValueError(f"{where}: {', '.join(missing)} missing")
    return {name: _number(found.get(name), name, where) for name in Log._fields[1:]}


def _number(value: Any, name: str, where: str) -> float:
    """`value`, NaN for null, which NaN and infinity are written as."""
    if value is None and name != "step":
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 2.0**1000:
        raise ValueError(f"{where}: {name} must be a number, got {value!r:.60}")
    return float(value)
