"""Grade the functions of a learner: values by our own op, gradients by finite differences.

The finite differences are of our own forward, so a wrong forward does not make a right backward
wrong. The learner's functions run once in each case, on each array library.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_array_api_obj

from xformer import dispatch, tree
from xformer.backends import Backend
from xformer.exercises.exercise import Exercise, Mistake
from xformer.gradcheck import gradcheck

RTOL = 1e-9  # of values, relative to the largest: float64 rounding in another order
SAME = 1e-6  # two gradients this close are by the same formula
MOST = 5  # explanations that are printed
PLANTED = "this is as the file was: the mistake is still there"


class Finding(NamedTuple):
    """What was found of one output or gradient on one library. An empty text means right."""

    row: str
    library: str
    case: str
    says: str


class Grade(NamedTuple):
    """The findings of an exercise, and hints by row.

    libraries: the names of the array libraries that it ran on.
    """

    exercise: Exercise
    libraries: tuple[str, ...]
    findings: tuple[Finding, ...]
    hints: Mapping[str, tuple[str, ...]]

    @property
    def ok(self) -> bool:
        """Whether everything is right on every library."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings that are not right."""
        return tuple(finding for finding in self.findings if finding.says)

    def __str__(self) -> str:
        rows = list(dict.fromkeys(finding.row for finding in self.findings))
        width = max(map(len, rows))
        lines = ["  ".join([" " * width, *self.libraries])]
        for row in rows:
            cells = [self._cell(row, name).rjust(len(name)) for name in self.libraries]
            lines.append("  ".join([row.ljust(width), *cells]))
        return "\n".join([*lines, *self._explained(rows)])

    def _cell(self, row: str, library: str) -> str:
        found = [f.says for f in self.findings if (f.row, f.library) == (row, library)]
        return "wrong" if any(found) else "ok" if found else "-"

    def _explained(self, rows: list[str]) -> Iterator[str]:
        """What is wrong: the first finding on each library, and hints. Equal texts are joined."""
        texts: dict[str, list[str]] = {}
        for row in rows:
            first: dict[str, Finding] = {}
            for finding in self.wrong:
                if finding.row == row:
                    first.setdefault(finding.library, finding)
            by_text: dict[tuple[str, str], list[str]] = {}
            for library, finding in first.items():
                by_text.setdefault((finding.says, finding.case), []).append(library)
            lines = [
                f"  {says}\n    case {case}, on {', '.join(on)}"
                for (says, case), on in by_text.items()
            ]
            lines += [f"  hint: {hint}" for hint in self.hints.get(row, ())]
            if lines:
                texts.setdefault("\n".join(lines), []).append(row)
        for text, same in list(texts.items())[:MOST]:
            yield f"\n{', '.join(same)} wrong:\n{text}"
        if len(texts) > MOST:
            yield f"\nand {sum(map(len, list(texts.values())[MOST:]))} more"


def load(path: str | Path) -> dict[str, Any]:
    """Run the Python file at `path` and return its names.

    ValueError, with the line, if it is not Python or raises; OSError if it cannot be read.
    """
    path = Path(path)
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), names)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid Python: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be imported: {_raised(error, path)}") from error
    return names


def grade(exercise: Exercise, names: Mapping[str, Any], libraries: Sequence[Backend]) -> Grade:
    """Run the functions among `names` in every case on every library, and compare.

    names: of the learner's file, as `load` returns them.
    libraries: backends with float64.
    """
    findings: list[Finding] = []
    hints: dict[str, list[str]] = {}
    for backend in libraries:
        for case in exercise.draws:
            run = _Run(exercise, names, backend, case)
            findings += run.findings()
            for row, hint in run.hints():
                hints.setdefault(row, []).append(hint)
    by_row = {row: tuple(dict.fromkeys(found)) for row, found in hints.items()}
    return Grade(exercise, tuple(b.name for b in libraries), tuple(findings), by_row)


class _Wrong(Exception):
    """What is wrong with a row, as a sentence."""


class _Run:
    """The learner's functions in one case on one library.

    got, wanted: NumPy arrays by row. A row of the first is missing if it could not be computed.
    """

    def __init__(
        self, exercise: Exercise, names: Mapping[str, Any], backend: Backend, case: str
    ) -> None:
        self.exercise, self.names, self.backend, self.case = exercise, names, backend, case
        self.arrays, self.options = exercise.draw(case)
        self.got: dict[str, Any] = {}
        self.wanted: dict[str, Any] = {}
        self.given: dict[str, Any] = {}  # the arguments, on the library
        self.dy: Any = None
        self.says: dict[str, str] = {}

    def findings(self) -> list[Finding]:
        """A finding for each output and gradient, and one for what else is wrong."""
        exercise = self.exercise
        with dispatch.reference_only():
            y = exercise.reference(*self.arrays.values(), **self.options)
        cache: Any = None
        if exercise.has_backward:
            y, cache = y
        outputs = y if isinstance(y, tuple) else (y,)
        self.wanted = tree.flatten(dict(zip(exercise.outputs, outputs, strict=True)))
        try:
            saved = self._forward()
        except _Wrong as wrong:
            self.says = dict.fromkeys(self.wanted, str(wrong))
        else:
            if exercise.has_backward:
                self.dy = np.random.default_rng(0).normal(size=y.shape)
                grads = cache.backward(self.dy)
                grads = grads if isinstance(grads, tuple) else (grads,)
                self.wanted |= dict(zip(exercise.gradient_names, grads, strict=False))
                self._backward(saved, y)
        return [Finding(row, self.backend.name, self.case, says) for row, says in self.says.items()]

    def _forward(self) -> Any:
        """Call the forward, judge its outputs, and return what it saves."""
        exercise, name = self.exercise, self.exercise.function_name
        given = {k: self._moved(v) for k, v in (self.arrays | self.options).items()}
        options = {k: given[k] for k in self.options}
        result = self._call(name, *(given[k] for k in self.arrays), **options)
        saved = None
        if exercise.has_backward:
            if not isinstance(result, tuple) or len(result) != 2:
                raise _Wrong(f"{name} must return (y, saved), got {_form(result)}")
            result, saved = result
        n = len(exercise.outputs)
        outputs = (result,) if n == 1 else result
        if not isinstance(outputs, tuple) or len(outputs) != n:
            wanted = f"({', '.join(exercise.outputs)})"
            raise _Wrong(f"{name} must return {wanted}, got {_form(outputs)}")
        got = tree.flatten(dict(zip(exercise.outputs, outputs, strict=True)))
        if more := got.keys() - self.wanted.keys():
            raise _Wrong(f"{name} must return {', '.join(self.wanted)}; {min(more)} is too many")
        for row, wanted in self.wanted.items():
            self.says[row] = self._judged(row, got, wanted)
        written = self._written(given)
        if written:
            self.says["inputs"] = f"{name} writes to its argument {written}: return a new array"
        self.given = given
        return saved

    def _backward(self, saved: Any, y: Any) -> None:
        """Call the backward, judge the form of each gradient, then its values."""
        names, name = self.exercise.gradient_names, f"{self.exercise.function_name}_backward"
        try:
            grads = self._gradients(name, saved, self.dy)
        except _Wrong as wrong:
            self.says |= dict.fromkeys(names, str(wrong))
            return
        wanted = {row: self.wanted[row] for row in names}
        formed = {row: self._formed(row, grads, wanted[row]) for row in names}
        self.says |= formed
        if any(formed.values()):
            return
        for row, error in self._numeric(name, saved, y).items():
            self.says[row] = self._difference(row, self.wanted[row]) if error else ""
            if error and not self.says[row]:
                self.says[row] = error
        written = self._written(self.given)
        if written:
            says = f"{name} writes to the argument {written} of the forward"
            self.says.setdefault("inputs", says)

    def _gradients(self, name: str, saved: Any, dy: Any) -> dict[str, Any]:
        """The learner's gradients for the host's dy, on the library, by row."""
        moved = self.backend.asarray(dy + 0)
        grads = self._call(name, moved, saved)
        names = self.exercise.gradient_names
        grads = grads if isinstance(grads, (tuple, list)) else (grads,)
        if len(grads) != len(names):
            wanted = f"{len(names)} gradient{'s' if len(names) > 1 else ''} ({', '.join(names)})"
            raise _Wrong(f"{name} must return {wanted}, got {len(grads)}")
        if not np.array_equal(self.backend.to_numpy(moved), dy):
            raise _Wrong(f"{name} writes to dy: return a new array")
        return dict(zip(names, grads, strict=True))

    def _numeric(self, name: str, saved: Any, y: Any) -> dict[str, str]:
        """By gradient: what finite differences of our own forward say, empty if they agree."""
        run = self

        class Cache(NamedTuple):
            def backward(self, dy: Any) -> Any:
                grads = run._gradients(name, saved, dy)
                return tuple(run.backend.to_numpy(g) for g in grads.values())

        def forward(*arrays: Any) -> tuple[Any, Any]:
            with dispatch.reference_only():
                return run.exercise.reference(*arrays, **run.options)[0], Cache()

        try:
            report = gradcheck(forward, *self.arrays.values(), elementwise=0)
        except _Wrong as wrong:
            return dict.fromkeys(self.exercise.gradient_names, str(wrong))
        _, *rows = report.rows
        errors = [row.error for row in rows]
        *each, again, _ = [
            f"relative error {e:.1e}" if not e <= report.rtol else "" for e in errors
        ]
        if again:
            return dict.fromkeys(
                self.exercise.gradient_names,
                f"{name} gives another result when it is called again: it changes `saved`",
            )
        return dict(zip(self.exercise.gradient_names, each, strict=True))

    def _judged(self, row: str, got: dict[str, Any], wanted: Any) -> str:
        return self._formed(row, got, wanted) or self._difference(row, wanted)

    def _formed(self, row: str, got: dict[str, Any], wanted: Any) -> str:
        """What is wrong with the library, dtype, shape or finiteness of a row; it goes to `got`."""
        array, wanted = got.get(row), np.asarray(wanted)
        form = f"{wanted.dtype} of shape {wanted.shape}"
        mine = type(self.backend.asarray(wanted))
        if array is None or not is_array_api_obj(array):
            return f"must be an array, {form}, got {_form(array)}"
        if not isinstance(array, (mine, np.generic) if mine is np.ndarray else mine):
            return f"must be an array of {self.backend.name}, got {_form(array)} of NumPy"
        host = self.got[row] = np.asarray(self.backend.to_numpy(array))
        if host.dtype != wanted.dtype and host.dtype.kind + wanted.dtype.kind not in ("iu", "ui"):
            return f"must be {form}, got {host.dtype}"
        if host.shape != wanted.shape:
            return f"must have shape {wanted.shape}, got {host.shape}"
        if not np.all(np.isfinite(host)):
            at = _first(~np.isfinite(host))
            return f"must be finite, got {host[at]} at {_at(row, at)}"
        return ""

    def _difference(self, row: str, wanted: Any) -> str:
        """The error of a row, relative to the largest element, and the worst element."""
        got, wanted = self.got[row], np.asarray(wanted)
        error = _distance(got, wanted)
        if error <= RTOL:
            return ""
        at = np.unravel_index(int(np.argmax(abs(got - wanted))), wanted.shape)
        return (
            f"relative error {error:.2g}: {_at(row, at)} is {got[at]:.4g}, must be {wanted[at]:.4g}"
        )

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        """The result of the learner's function. _Wrong if there is none, or if it raises."""
        function = self.names.get(name)
        if not callable(function):
            raise _Wrong(f"the file has no function {name}")
        try:
            with np.errstate(all="ignore"):
                return function(*args, **options)
        except NotImplementedError:
            raise _Wrong(f"{name} is still to be written") from None
        except (Exception, SystemExit) as error:
            raise _Wrong(f"{name} raises {_raised(error, self.names.get('__file__'))}") from error

    def _moved(self, argument: Any) -> Any:
        """A copy on the library of an array or of a list or dict of arrays; all else as it is."""
        if isinstance(argument, (np.ndarray, list, dict)):
            return tree.map(lambda a: self.backend.asarray(a + 0), argument)
        return argument

    def _written(self, given: dict[str, Any]) -> str:
        """The name of an argument that is not what it was."""
        for name, before in tree.flatten(self.arrays | self.options).items():
            if isinstance(before, np.ndarray):
                now = self.backend.to_numpy(tree.flatten(given)[name])
                if not np.array_equal(now, before):
                    return name
        return ""

    def hints(self) -> Iterator[tuple[str, str]]:
        """(row, hint) for each wrong row whose values are known to come from a wrong formula."""
        wrong = [row for row, says in self.says.items() if says and row in self.got]
        known = self._known(wrong)
        yield from known
        for row in wrong:
            if row not in dict(known) and np.all(np.isfinite(self.got[row])):
                yield from ((row, hint) for hint in self._generic(row))

    def _known(self, wrong: list[str]) -> list[tuple[str, str]]:
        """Hints of the exercise's own mistakes: all that their formulas give was got."""
        found = []
        a = SimpleNamespace(**self.arrays, **self.options)
        for mistake in self.exercise.mistakes if wrong else ():
            values = _values(mistake, a, self.dy)
            hit = [row for row in values if row in wrong]
            if any(_alike(values[row], self.wanted[row]) for row in hit):
                continue
            if all(row in self.got and _alike(self.got[row], v) for row, v in values.items()):
                planted = mistake.says in self.exercise.planted
                found += [(row, PLANTED if planted else mistake.says) for row in hit]
        return found

    def _generic(self, row: str) -> Iterator[str]:
        """Hints that need no formula: a factor, a transpose, a sum left out, another gradient."""
        got, wanted = self.got[row], np.asarray(self.wanted[row])
        if got.shape != wanted.shape:
            if got.ndim == 2 and _alike(got.T, wanted):
                yield "it is transposed"
            elif got.ndim > wanted.ndim and _alike(
                np.sum(got, axis=tuple(range(got.ndim - wanted.ndim))), wanted
            ):
                yield "sum it over the axes that the argument does not have"
            return
        factor = float(np.sum(got * wanted) / max(np.sum(wanted * wanted), 1e-300))
        if not np.any(got):
            yield "it is zero"
        elif _alike(got, factor * wanted):
            yield _factor(factor, self.arrays)
        elif got.ndim == 2 and got.shape[0] == got.shape[1] and _alike(got.T, wanted):
            yield "it is transposed"
        for other, value in self.wanted.items():
            if other != row and value is not None and _alike(got, np.asarray(value)):
                yield f"this is the right {other}"


def _values(mistake: Mistake, a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    """The arrays of a wrong formula; none if the shapes do not fit it."""
    try:
        with np.errstate(all="ignore"):
            return tree.flatten(mistake.formula(a, dy))
    except ValueError:
        return {}


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


def _alike(a: Any, b: Any) -> bool:
    """Whether two arrays are equal up to rounding. NaN equals NaN."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    return _distance(np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0)) <= SAME


def _distance(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest element of b."""
    return float(np.max(abs(a - b), initial=0) / (np.max(abs(b), initial=0) or 1.0))


def _form(value: Any) -> str:
    """What a value is, for a message."""
    if is_array_api_obj(value):
        return f"an array of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else type(value).__name__


def _at(row: str, index: tuple[Any, ...]) -> str:
    return f"{row}[{', '.join(str(int(i)) for i in index)}]" if index else row


def _first(where: Any) -> tuple[Any, ...]:
    return np.unravel_index(int(np.argmax(where)), where.shape)


def _raised(error: BaseException, path: Any) -> str:
    """The error as text, with the last line of the learner's file that led to it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {shorten(str(error), 160)}{where}"
