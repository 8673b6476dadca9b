"""The arrays that the source documents print: numbers alone, kept in <document>.json.

A printed number stands for every number that rounds to it, so an array equals a printed one if it
is within half a unit of the last printed digit, element by element.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TINY = 1e-12  # a number halfway between two printed ones may be rounded either way


class Printed:
    """The printed arrays of one document.

    Each is kept as rows of its last axis, as text, because the digits count. `cut` is the number
    in whose middle a truncated print ends.
    """

    def __init__(self, document: str) -> None:
        path = Path(__file__).with_name(f"{document}.json")
        content = json.loads(path.read_text(encoding="utf-8"))
        self._arrays: dict[str, dict[str, Any]] = content["arrays"]
        self._precision: int = content["precision"]
        self.names = tuple(self._arrays)

    def __getitem__(self, name: str) -> np.ndarray:
        """The printed array `name`, which must be a whole one."""
        array = self._arrays[name]
        return np.array([float(n) for n in self._numbers(name)]).reshape(array["shape"])

    def half_units(self, name: str) -> np.ndarray:
        """Half a unit of the last printed digit of each number, in one row."""
        exponents = [int(n.partition("e")[2] or 0) for n in self._numbers(name)]
        return 0.5 * 10.0 ** (np.array(exponents) - self._precision)

    def check(
        self,
        name: str,
        ours: np.ndarray,
        slack: np.ndarray | float = 0.0,
        wrong: tuple[int, ...] = (),
    ) -> None:
        """AssertionError unless `ours` has the printed shape and digits.

        slack: what an input that is itself known by its printed digits alone may add.
        wrong: elements (of one flat row) that are printed wrong, and so must differ.
        """
        array = self._arrays[name]
        numbers = self._numbers(name)
        if "shape" in array:
            assert list(ours.shape) == array["shape"], f"{name}: shape {ours.shape}"
        allowed = self.half_units(name) + TINY
        allowed = allowed + np.broadcast_to(slack, ours.shape).ravel()[: len(numbers)]
        flat = ours.ravel()
        error = np.abs(flat[: len(numbers)] - np.array([float(n) for n in numbers]))
        assert bool(np.all(error[list(wrong)] > allowed[list(wrong)])), f"{name}: right after all"
        error[list(wrong)] = 0.0
        worst = int(np.argmax(error / allowed))
        assert error[worst] <= allowed[worst], (
            f"{name}: element {worst} is printed {numbers[worst]}, ours is {flat[worst]:.12g}"
        )
        if "cut" in array:
            assert f"{flat[len(numbers)]:.{self._precision}f}".startswith(array["cut"]), name

    def _numbers(self, name: str) -> list[str]:
        return " ".join(self._arrays[name]["rows"]).split()


def spread(
    linear: Callable[[np.ndarray], tuple[np.ndarray, ...]], shape: tuple[int, ...], error: float
) -> tuple[np.ndarray, ...]:
    """How far the results of a linear map can move if each of its inputs moves by `error`.

    The sum of |linear(unit)| over all unit inputs, times `error`: attained, so not too lax.
    """
    units = np.eye(int(np.prod(shape))).reshape((-1, *shape))
    columns = [[np.abs(y) for y in linear(unit)] for unit in units]
    return tuple(error * sum(column) for column in zip(*columns, strict=True))
