"""What on CuPy waits for the device, by the sources of CuPy 14.2 and array-api-compat 1.16.

Each was called on real CuPy whose driver's functions were replaced, and waited for its stream. All
other functions of the array API standard did not wait, nor did `sort`, whose functions of CUB name
no wait. Products, `linalg` and `fft` were not called: their libraries were missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_COUNTS = "the number of elements that it finds is the result's shape"
_SETS = "array-api-compat sets elements by a boolean index"
# Functions, and why they wait. Not by the standard, but found in the namespace: the last line.
WAITS: Mapping[str, str] = {
    "clip": _SETS + ", once for each bound",
    "sign": _SETS + ", where numbers are no integers",
    "linspace": "it looks whether the step between two arrays is 0",
    "arange": "an end that is an array is brought to the host",
    "repeat": "counts that are an array are summed up on the host",
    **dict.fromkeys(("nonzero", "where"), _COUNTS),
    **dict.fromkeys((f"unique_{x}" for x in ("all", "counts", "inverse", "values")), _COUNTS),
    **dict.fromkeys(
        ("argwhere", "bincount", "compress", "extract", "flatnonzero", "unique"), _COUNTS
    ),
}
BOOLEAN = "x[boolean]"  # to read as to write


def reason(
    name: str, args: Sequence[Any], options: Mapping[str, Any], is_array: Callable[[Any], bool]
) -> str | None:
    """Why the host would wait for a function of these arguments; None where it would not."""
    waits = {
        "sign": lambda: args[0].dtype.kind == "f",
        "where": lambda: len(args) + len(options) == 1,
        "linspace": lambda: any(map(is_array, (*args, *options.values()))),
        "arange": lambda: any(map(is_array, (*args, *options.values()))),
        "repeat": lambda: any(map(is_array, (*args[1:], *options.values()))),
    }.get(name, lambda: True)
    return f"{name}: {WAITS[name]}" if name in WAITS and waits() else None


def reason_of_index(index: Any, is_array: Callable[[Any], bool]) -> str | None:
    """Why the host would wait for x[index]."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(is_array(part) and part.dtype == np.bool_ for part in parts):
        return f"{BOOLEAN}: {_COUNTS}"
    return None
