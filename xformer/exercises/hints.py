"""Say which known mistake gives the values that a learner got."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from xformer.base import tree

if TYPE_CHECKING:
    from xformer.exercises.grade import Run  # which imports this module

SAME = 1e-6  # arrays with a relative difference up to this come from the same formula
PLANTED = "the mistake of the file is still there"


def hints_of(run: Run) -> Iterator[tuple[str, str]]:
    """(row, hint) for each wrong row whose values are known to come from a wrong formula."""
    if not run.wrong:
        return
    arrays, options = run.exercise.draw(run.case)
    known = _known(run, SimpleNamespace(**arrays, **options))
    yield from known
    for row in run.wrong:
        if row not in dict(known) and np.all(np.isfinite(run.got[row])):
            yield from ((row, hint) for hint in _general(row, run.got[row], run.wanted, arrays))


def _known(run: Run, a: SimpleNamespace) -> list[tuple[str, str]]:
    """The exercise's mistakes whose formulas give exactly the learner's values."""
    hints = []
    for mistake in run.exercise.mistakes:
        try:
            with np.errstate(all="ignore"):
                values = tree.flatten(mistake.formula(a, run.dy))
        except ValueError:  # the shapes do not fit the formula
            continue
        hit = [row for row in values if row in run.wrong]
        if any(alike(values[row], run.wanted[row]) for row in hit):
            continue
        if all(row in run.got and alike(run.got[row], value) for row, value in values.items()):
            planted = mistake.says in run.exercise.planted
            hints += [(row, PLANTED if planted else mistake.says) for row in hit]
    return hints


def _general(
    row: str, got: Any, wanted_rows: dict[str, Any], arrays: dict[str, Any]
) -> Iterator[str]:
    """Hints that need no formula: a factor, a transpose, a sum left out, another gradient."""
    wanted = np.asarray(wanted_rows[row])
    if got.shape != wanted.shape:
        leading = tuple(range(got.ndim - wanted.ndim))
        if got.ndim == 2 and alike(got.T, wanted):
            yield "it is transposed"
        elif leading and alike(np.sum(got, axis=leading), wanted):
            yield "sum it over the axes that the argument does not have"
        return
    factor = float(np.sum(got * wanted) / (np.sum(wanted * wanted) or 1.0))
    if distance(got, 0 * got) <= SAME * distance(wanted, 0 * wanted):
        yield "it is zero"
    elif factor and alike(got, factor * wanted):
        yield _factor(factor, arrays)
    elif got.ndim == 2 and alike(got.T, wanted):
        yield "it is transposed"
    for other, value in wanted_rows.items():
        if other != row and value is not None and alike(got, value):
            yield f"this is the right {other}"


def _factor(factor: float, arrays: dict[str, Any]) -> str:
    """A hint about a gradient that is `factor` times the right one."""
    if math.isclose(factor, -1, rel_tol=1e-6):
        return "the sign is wrong"
    ratio = abs(factor) if abs(factor) > 1 else 1 / abs(factor)
    way = "large" if abs(factor) > 1 else "small"
    sign = ", and the sign is wrong" if factor < 0 else ""
    leaves = tree.flatten(arrays)
    where = [name for name, a in leaves.items() if _is_size(ratio, a.shape)]
    size = f": {ratio:.0f} is a size, or a product of sizes, of {where[0]}" if where else ""
    sums = " (a sum in the place of a mean, or the reverse)" if where else ""
    return f"it is {ratio:.6g} times too {way}{size}{sums}{sign}"


def _is_size(ratio: float, shape: tuple[int, ...]) -> bool:
    """Whether `ratio` is the product of neighbouring sizes."""
    n = len(shape)
    products = {math.prod(shape[i:j]) for i in range(n) for j in range(i + 1, n + 1)}
    return any(math.isclose(ratio, product, rel_tol=1e-6) for product in products)


def alike(a: Any, b: Any) -> bool:
    """Whether two arrays are equal up to rounding. NaN equals NaN."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    return distance(np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0)) <= SAME


def distance(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest element of b."""
    return float(np.max(abs(a - b), initial=0) / (np.max(abs(b), initial=0) or 1.0))
