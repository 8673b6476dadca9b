"""The log of a run of `xformer train`: one JSON object for each step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.base.choices import near_path
from xformer.training.log import LOG

NUMBERS = dict.fromkeys(("step", "loss", "norm", "lr", "tokens", "seconds"))  # of every line
MOST = 2.0**1000


class Log(NamedTuple):
    """The columns of a log, one value for each step. A missing value or null is NaN."""

    name: str
    step: np.ndarray  # (N,), as all columns
    loss: np.ndarray
    norm: np.ndarray
    lr: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    validation: np.ndarray


COLUMNS = Log._fields[1:]


def read_log(run: str | os.PathLike[str]) -> Log:
    """The log of a run.

    run: the folder of the run, or the file of the log.

    A last line without a line end is still being written, and is ignored. FileNotFoundError if
    there is no log. ValueError if a line is damaged (the message has its number), or there is no
    step.
    """
    path = Path(run)
    if path.is_dir() or not path.exists():
        path = path / LOG
    if not path.is_file():
        near = near_path(Path(run))
        raise FileNotFoundError(f"{run} is no run of xformer train: there is no {path}{near}")
    lines = path.read_bytes().split(b"\n")[:-1]
    rows: list[list[float]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_row(line, rows[-1][0] if rows else 0))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no step yet")
    return Log(path.parent.name or str(path.parent), *np.array(rows).T)


def _row(line: bytes, last: float) -> list[float]:
    """The numbers of a line. last: the step of the line before, which must be smaller."""
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        what = getattr(error, "msg", error)  # without a line number, as it would be always 1
        raise ValueError(f"must be a JSON object, {what}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"must be a JSON object, got {fields!r:.60}")
    if not fields.keys() >= NUMBERS.keys():
        raise ValueError(f"{', '.join(n for n in NUMBERS if n not in fields)} missing")
    step = fields["step"]
    if type(step) is not int or not 0 < step < MOST:
        raise ValueError(f"step must be a whole number above 0, got {step!r:.60}")
    if step <= last:
        raise ValueError(f"steps must rise, got {step} after {last:.0f}")
    return [_number(name, fields.get(name)) for name in COLUMNS]


def _number(name: str, value: Any) -> float:
    """`value` as a float; NaN for null, as which NaN and infinity are logged."""
    if type(value) in (int, float) and -MOST < value < MOST:  # false for NaN and infinity
        return float(value)
    if value is None:
        return math.nan
    raise ValueError(f"{name} must be a number, got {value!r:.60}")
